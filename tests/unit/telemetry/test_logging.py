"""Log lines: one JSON object each, readable console lines, and nothing of users or keys in either."""

import io
import json
import logging
import warnings

import pytest

from server.telemetry.logging import WITHHELD, configure


@pytest.fixture
def restored_logging():
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    yield
    root.handlers[:], root.level = before
    logging.captureWarnings(capture=False)


def logged(log_format, level="info"):
    stream = io.StringIO()
    configure(level, log_format, stream)
    return stream


@pytest.mark.usefixtures("restored_logging")
class TestLogging:
    def test_json_lines_carry_the_facts(self):
        stream = logged("json")
        logging.getLogger("server.api").info("request %s", "finished", extra={"status": 200, "tokens": 17})
        line = json.loads(stream.getvalue())
        assert line.pop("ts").endswith("+00:00")
        assert line == {
            "level": "info",
            "logger": "server.api",
            "event": "request finished",
            "status": 200,
            "tokens": 17,
        }

    def test_a_fact_cannot_overwrite_the_envelope(self):
        stream = logged("json")
        logging.getLogger("x").info("said", extra={"event": "forged", "level": "debug"})
        assert json.loads(stream.getvalue())["event"] == "said"

    def test_newlines_in_a_message_stay_in_one_json_line(self):
        stream = logged("json")
        logging.getLogger("x").warning("a\nb", extra={"path": "c\nd"})
        assert len(stream.getvalue().splitlines()) == 1

    @pytest.mark.parametrize("log_format", ["json", "console"])
    @pytest.mark.parametrize("key", sorted(WITHHELD))
    def test_what_users_wrote_and_keys_are_withheld(self, log_format, key):
        stream = logged(log_format)
        logging.getLogger("x").error("refused", extra={key: "sesame"})
        assert "sesame" not in stream.getvalue()
        assert key in stream.getvalue()

    def test_console_lines_read_as_a_sentence(self):
        stream = logged("console")
        logging.getLogger("server.api").info("request finished", extra={"status": 200})
        assert stream.getvalue().endswith("INFO    server.api  request finished  status=200\n")

    @pytest.mark.parametrize("log_format", ["json", "console"])
    def test_exceptions_keep_their_traceback(self, log_format):
        stream = logged(log_format)
        try:
            raise ValueError("broken")
        except ValueError:
            logging.getLogger("x").exception("failed")
        assert "ValueError: broken" in stream.getvalue()

    def test_levels_filter(self):
        stream = logged("console", "warning")
        logging.getLogger("x").info("not shown")
        logging.getLogger("x").warning("shown")
        assert "not shown" not in stream.getvalue()
        assert "shown" in stream.getvalue()

    def test_chatty_libraries_speak_from_warning_on(self):
        stream = logged("console", "debug")
        logging.getLogger("httpx").info("HTTP Request: POST")
        logging.getLogger("uvicorn.error").info("Started server process")
        assert stream.getvalue() == ""

    def test_python_warnings_become_log_lines(self):
        stream = logged("json")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            logging.captureWarnings(capture=True)
            warnings.warn("old", DeprecationWarning, stacklevel=1)
        assert "DeprecationWarning: old" in json.loads(stream.getvalue())["event"]
