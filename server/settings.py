"""What the operator asked for: flags over MEGAKERNEL_* variables over --config over configs/serve.toml over defaults.

The one reader of settings. Nothing below sees `Settings`: `resolve` turns them into a frozen ServePlan.
Unknown names are refused, with the nearest known one. Must not know: HTTP, what the engine does with a value.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ByteSize, Field, SecretStr, ValidationError
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)
from typing_extensions import override

from megakernel_runtime.interface import Progress, RuntimeSpec
from server.errors import ConfigError
from server.plan import Limits, ServePlan
from server.scheduling.settings import SchedulerSettings

ENV_PREFIX = "MEGAKERNEL_"

# No settings of ours: what Kubernetes sets in every pod beside a service called "megakernel", and our tests' own.
_FOREIGN = re.compile(rf"{ENV_PREFIX}(SERVICE_(HOST|PORT.*)|PORT_\d+_(TCP|UDP|SCTP).*|TEST_.*)", re.IGNORECASE)


def _split(value: object) -> object:
    """Several values in one string, as the environment has them: separated by commas."""
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


def _setting(default: object, panel: str, help_text: str, **bounds: Any) -> Any:
    return Field(default, description=help_text, json_schema_extra={"panel": panel}, **bounds)


def default_cache_dir() -> Path:
    """Return the user's cache directory for models, as the XDG base directory specification places it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megakernel"


Strings = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
Secrets = Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(_split)]

_MODEL, _SERVER, _LIMITS, _ENGINE, _LOGS, _DEV = "Model", "Server", "Limits", "Engine", "Logs", "Development"


class Settings(BaseSettings):
    """Every setting. A name here is a key in a config file, --its-name as a flag, MEGAKERNEL_ITS_NAME as a variable."""

    model_config: ClassVar[SettingsConfigDict] = SettingsConfigDict(
        env_prefix=ENV_PREFIX, extra="forbid", frozen=True, env_ignore_empty=True, str_strip_whitespace=True
    )

    model: str = _setting(
        "smollm2-135m", _MODEL, "Catalogue name, Hugging Face directory, .gguf file, or hub id.", min_length=1
    )
    served_model_name: Strings = _setting(
        (), _MODEL, "Name that requests use; repeat for aliases. Default: the model's own name."
    )
    cache_dir: Path = Field(
        default_factory=default_cache_dir,
        description="Where fetched models are kept.",
        json_schema_extra={"panel": _MODEL, "shown_default": "~/.cache/megakernel"},
    )

    config: Path | None = _setting(None, _SERVER, "TOML file with settings; flags and variables win over it.")
    host: str = _setting("127.0.0.1", _SERVER, "Address to listen on; 0.0.0.0 opens the server to the network.")
    port: int = _setting(8000, _SERVER, "Port to listen on; 0 picks a free one.", ge=0, le=65535)
    api_key: Secrets = _setting((), _SERVER, "Key that requests must carry; repeat for several. Prefer --api-key-file.")
    api_key_file: Path | None = _setting(None, _SERVER, "File with one API key a line.")
    metrics_public: bool = _setting(True, _SERVER, "Serve /metrics without an API key.")
    cors_origin: Strings = _setting((), _SERVER, "Web origin that browsers may call from; repeatable, * for all.")
    drain_seconds: float = _setting(30.0, _SERVER, "After SIGTERM, how long running requests may take to end.", ge=0)

    max_body: ByteSize = _setting(ByteSize(8 * 1024 * 1024), _LIMITS, "Largest request body, e.g. 8MiB.", ge=1024)
    request_deadline_seconds: float = _setting(
        600.0, _LIMITS, "Longest life of a request, waiting included; 0: no bound.", ge=0
    )
    max_concurrent_per_key: int = _setting(0, _LIMITS, "Requests at once for one API key; 0: no bound.", ge=0)
    max_queue_requests: int = _setting(256, _LIMITS, "Waiting requests beyond which new ones get 429.", ge=0)
    max_queue_tokens: int = _setting(1_000_000, _LIMITS, "Waiting prompt tokens beyond which new ones get 429.", ge=1)

    backend: Literal["auto", "megakernel", "graphs", "eager", "cpu", "fake"] = _setting(
        "auto", _ENGINE, "What runs the model; auto takes the best that this machine has."
    )
    max_slots: int = _setting(0, _ENGINE, "Sequences that run at once; 0: as the backend sees fit.", ge=0)
    max_model_len: int = _setting(0, _ENGINE, "Longest prompt and output together, in tokens; 0: the model's.", ge=0)
    max_step_tokens: int = _setting(0, _ENGINE, "Tokens computed in one step at most; 0: chosen.", ge=0)
    page_size: int = _setting(0, _ENGINE, "Tokens in one page of the KV cache; 0: chosen.", ge=0)
    pages: int = _setting(0, _ENGINE, "Pages in the KV cache; 0: as many as --kv-memory holds.", ge=0)
    kv_memory: ByteSize = _setting(ByteSize(0), _ENGINE, "Memory for the KV cache, e.g. 4GiB; 0: chosen.", ge=0)
    prefix_cache: bool = _setting(True, _ENGINE, "Keep the KV pages of past prompts for prompts that begin alike.")
    threads: int = _setting(0, _ENGINE, "Threads of the cpu backend; 0: one a core.", ge=0)
    weight_format: Literal["auto", "fp32", "fp16", "bf16", "int8", "int4"] = _setting(
        "auto", _ENGINE, "How the cpu backend holds weights; auto takes the fastest that is as exact as the file."
    )
    sm_reserve: int = _setting(0, _ENGINE, "Multiprocessors that the resident kernel leaves to others.", ge=0)
    idle_park_ms: int = _setting(2000, _ENGINE, "Idle time after which the resident kernel is parked.", ge=0)

    log_level: Literal["debug", "info", "warning", "error"] = _setting("info", _LOGS, "Least level that is logged.")
    log_format: Literal["auto", "console", "json"] = _setting(
        "auto", _LOGS, "Form of log lines; auto: console on a terminal, else json."
    )

    random_weights: bool = _setting(False, _DEV, "Draw the weights from a fixed seed; config.json alone is enough.")
    fake_script: str = _setting("", _DEV, "Script of the fake backend, JSON.")

    @override
    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Order the sources, strongest first. No .env file is read: what is in force shows in the process."""
        chosen = init_settings().get("config") or os.environ.get(f"{ENV_PREFIX}CONFIG")
        return init_settings, _Environment(settings_cls), TomlConfigSettingsSource(settings_cls, config_files(chosen))


class _Environment(EnvSettingsSource):
    @override
    def _load_env_vars(self) -> Mapping[str, str | None]:
        return {name: value for name, value in super()._load_env_vars().items() if not _is_foreign(name, value)}


def _is_foreign(name: str, value: str | None) -> bool:
    """Also MEGAKERNEL_PORT itself: Kubernetes sets it to an address such as tcp://10.0.0.1:8000."""
    return bool(_FOREIGN.fullmatch(name)) or (name.upper() == f"{ENV_PREFIX}PORT" and "://" in (value or ""))


def config_files(chosen: str | Path | None) -> list[Path]:
    """Return the files to read, weakest first: the shipped one, then the operator's. ConfigError: it is not there."""
    shipped = Path(str(files("configs") / "serve.toml"))
    if not chosen:
        return [shipped]
    path = Path(chosen).expanduser()
    if not path.is_file():
        raise ConfigError(f"config file {path} does not exist")
    return [shipped, path]


def load_settings(flags: Mapping[str, object]) -> Settings:
    """Return the settings in force: `flags` (name -> value, given ones only), environment, files, defaults.

    Raises ConfigError: an unknown name, or a value out of bounds; the message says where it stands and what would do.
    """
    known = tuple(Settings.model_fields)
    for name in os.environ:
        if name.upper().startswith(ENV_PREFIX) and not _is_foreign(name, os.environ[name]):
            _check_known(name[len(ENV_PREFIX) :].lower(), known, f"environment variable {name}")
    chosen = flags.get("config") or os.environ.get(f"{ENV_PREFIX}CONFIG")
    in_files = tuple(name for name in known if name != "config")  # a file does not name another
    for path in config_files(str(chosen) if chosen else None):
        for key in _read_toml(path):
            _check_known(key, in_files, f"{path}: setting {key!r}")
    try:
        return Settings(**dict(flags))  # pyright: ignore[reportArgumentType] (checked by pydantic just here)
    except ValidationError as error:
        raise ConfigError(_explain(error, flags)) from None


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}") from None


def _check_known(name: str, known: tuple[str, ...], where: str) -> None:
    if name in known:
        return
    near = difflib.get_close_matches(name, known, n=1)
    remedy = f"did you mean {near[0]!r}?" if near else "`megakernel serve --help` lists all settings"
    raise ConfigError(f"{where} is not known; {remedy}")


def _explain(error: ValidationError, flags: Mapping[str, object]) -> str:
    """Return one line for each bad value: where it was set, what it is, what it should be."""
    lines: list[str] = []
    for item in error.errors():
        name = str(item["loc"][0]) if item["loc"] else "settings"
        if name in flags:
            where = "--" + name.replace("_", "-")
        elif f"{ENV_PREFIX}{name.upper()}" in os.environ:
            where = f"environment variable {ENV_PREFIX}{name.upper()}"
        else:
            where = f"config file, setting {name!r}"
        shown = "" if "key" in name else f" is {item['input']!r}:"
        lines.append(f"{where}{shown} {item['msg'][:1].lower()}{item['msg'][1:]}")
    return "\n".join(lines)


def resolve(settings: Settings, progress: Progress) -> ServePlan:
    """Return the plan that these settings mean on this machine; fetches the model when it is not here yet.

    Raises ConfigError (keys cannot be read) and ModelError (no such model, or it cannot be fetched).
    """
    from server.catalog import resolve as locate

    model_path = locate(settings.model, cache_dir=settings.cache_dir.expanduser(), progress=progress)
    return ServePlan(
        host=settings.host,
        port=settings.port,
        served_names=settings.served_model_name or _names_of(settings.model),
        model_path=model_path,
        runtime=_runtime_spec(settings, model_path),
        scheduler=SchedulerSettings(
            max_queue_requests=settings.max_queue_requests,
            max_queue_tokens=settings.max_queue_tokens,
            prefix_cache=settings.prefix_cache,
        ),
        limits=Limits(
            max_body_bytes=int(settings.max_body),
            request_deadline_seconds=settings.request_deadline_seconds,
            max_concurrent_per_key=settings.max_concurrent_per_key,
        ),
        api_keys=_api_keys(settings),
        drain_seconds=settings.drain_seconds,
        metrics_public=settings.metrics_public,
        cors_origins=settings.cors_origin,
        log_level=settings.log_level,
        log_format=effective_log_format(settings),
    )


def effective_log_format(settings: Settings) -> str:
    """Return console or json: what "auto" means depends on whether a person looks at stderr."""
    if settings.log_format != "auto":
        return settings.log_format
    return "console" if sys.stderr.isatty() else "json"


def _runtime_spec(settings: Settings, model_path: Path) -> RuntimeSpec:
    return RuntimeSpec(
        backend=settings.backend,
        model_path=str(model_path),
        max_slots=settings.max_slots,
        max_model_len_tokens=settings.max_model_len,
        max_step_tokens=settings.max_step_tokens,
        page_size_tokens=settings.page_size,
        n_pages=settings.pages,
        kv_memory_bytes=int(settings.kv_memory),
        threads=settings.threads,
        weight_format=settings.weight_format,
        sm_reserve=settings.sm_reserve,
        idle_park_ms=settings.idle_park_ms,
        random_weights=settings.random_weights,
        fake_script=settings.fake_script,
    )


def _names_of(model: str) -> tuple[str, ...]:
    """Return the names that requests use: the catalogue's and the one asked for; a path's last part, without .gguf."""
    from server.catalog import entries, find

    path = Path(model).expanduser()
    if entry := find(model, entries()):
        return tuple(dict.fromkeys((entry.name, model)))
    return (path.resolve().name.removesuffix(".gguf"),) if path.exists() else (model,)


def _api_keys(settings: Settings) -> tuple[str, ...]:
    keys = [key.get_secret_value() for key in settings.api_key]
    if settings.api_key_file:
        try:
            keys += settings.api_key_file.expanduser().read_text().split()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"API key file {settings.api_key_file} cannot be read: {error}") from None
        if not keys:
            raise ConfigError(f"API key file {settings.api_key_file} holds no key; remove the setting to ask for none")
    return tuple(dict.fromkeys(keys))
