"""`megakernel serve`: settings, model, socket, engine, in the order in which each can fail cheapest.

Knows the order of a start. Must not know: what each step does inside.
"""

from __future__ import annotations

from server.cli.options import settings_flags


def serve(flags: dict[str, object]) -> None:
    """Serve a model over the OpenAI API.

    Fetches it when it is not on this machine yet. Stops on Ctrl-C or SIGTERM after running requests have ended.
    """
    from server.settings import effective_log_format, load_settings, resolve
    from server.telemetry.logging import configure

    settings = load_settings(flags)  # before anything slow is imported: a typing mistake is told at once
    log_format = effective_log_format(settings)
    configure(settings.log_level, log_format)

    from server.app import build_app
    from server.cli.console import err
    from server.cli.runner import listen, run
    from server.cli.startup import make_display

    with listen(settings.host, settings.port) as listener, make_display(log_format, err) as display:
        plan = resolve(settings, display)
        app = build_app(plan)
        run(app, app.state.engine, plan, listener, display)


serve_command = settings_flags(serve, positional="model")
