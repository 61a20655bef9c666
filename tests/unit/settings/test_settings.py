"""Where settings come from, in which order, and how a wrong one is explained."""

from pathlib import Path

import pytest

from server.errors import ConfigError
from server.settings import Settings, default_cache_dir, effective_log_format, load_settings, resolve


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    import os

    for name in list(os.environ):
        if name.upper().startswith("MEGAKERNEL_"):
            monkeypatch.delenv(name)


@pytest.fixture
def config_file(tmp_path):
    def write(text):
        path = tmp_path / "mine.toml"
        path.write_text(text)
        return path

    return write


def refusal(**flags):
    with pytest.raises(ConfigError) as caught:
        load_settings(flags)
    return str(caught.value)


def test_defaults():
    settings = load_settings({})
    assert (settings.model, settings.host, settings.port) == ("smollm2-135m", "127.0.0.1", 8000)
    assert settings.max_body == 8 * 1024 * 1024


def test_flag_beats_variable_beats_file_beats_default(monkeypatch, config_file):
    path = config_file("port = 1001\nthreads = 7\nmax_slots = 3\n")
    monkeypatch.setenv("MEGAKERNEL_PORT", "1002")
    monkeypatch.setenv("MEGAKERNEL_THREADS", "8")
    settings = load_settings({"port": 1003, "config": path})
    assert (settings.port, settings.threads, settings.max_slots, settings.pages) == (1003, 8, 3, 0)


def test_the_file_may_be_named_by_a_variable(monkeypatch, config_file):
    monkeypatch.setenv("MEGAKERNEL_CONFIG", str(config_file("port = 1001\n")))
    assert load_settings({}).port == 1001


def test_a_flag_names_the_file_rather_than_the_variable(monkeypatch, config_file, tmp_path):
    monkeypatch.setenv("MEGAKERNEL_CONFIG", str(tmp_path / "absent.toml"))
    assert load_settings({"config": config_file("port = 1001\n")}).port == 1001


@pytest.mark.parametrize(
    ("text", "values"),
    [("a", ("a",)), ("a,b", ("a", "b")), (" a , ,b ", ("a", "b")), ("", ())],
)
def test_lists_in_variables_are_separated_by_commas(monkeypatch, text, values):
    monkeypatch.setenv("MEGAKERNEL_SERVED_MODEL_NAME", text)
    assert load_settings({}).served_model_name == values


def test_lists_in_files_and_flags(config_file):
    assert load_settings({"config": config_file('cors_origin = ["https://a", "https://b"]')}).cors_origin == (
        "https://a",
        "https://b",
    )
    assert load_settings({"cors_origin": ["https://c"]}).cors_origin == ("https://c",)


@pytest.mark.parametrize(("text", "n_bytes"), [("4GiB", 4 * 2**30), ("1024", 1024), ("1.5 MB", 1_500_000)])
def test_sizes_carry_units(text, n_bytes):
    assert load_settings({"kv_memory": text}).kv_memory == n_bytes


def test_unknown_variable_is_refused_with_the_nearest(monkeypatch):
    monkeypatch.setenv("MEGAKERNEL_PROT", "1")
    assert refusal() == "environment variable MEGAKERNEL_PROT is not known; did you mean 'port'?"


def test_unknown_variable_far_from_any(monkeypatch):
    monkeypatch.setenv("MEGAKERNEL_XQZ", "1")
    assert "megakernel serve --help" in refusal()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("max_slot = 3", "setting 'max_slot' is not known; did you mean 'max_slots'?"),
        ("[server]\nport = 3", "setting 'server' is not known"),
        ("config = 'other.toml'", "setting 'config' is not known"),
        ("port = ", "cannot be read"),
        ("port = 70000", "config file, setting 'port' is 70000: input should be less than or equal to 65535"),
    ],
)
def test_bad_files(config_file, text, told):
    assert told in refusal(config=config_file(text))


def test_absent_file(tmp_path):
    assert "does not exist" in refusal(config=tmp_path / "absent.toml")


def test_bad_values_say_where_they_stand(monkeypatch):
    monkeypatch.setenv("MEGAKERNEL_PORT", "eighty")
    told = refusal(threads=-1)
    assert "environment variable MEGAKERNEL_PORT is 'eighty': input should be a valid integer" in told
    assert "--threads is -1: input should be greater than or equal to 0" in told


def test_a_choice_lists_what_would_do():
    assert "'megakernel', 'graphs', 'eager', 'cpu' or 'fake'" in refusal(backend="gpu")


def test_keys_are_shown_nowhere(monkeypatch, config_file):
    monkeypatch.setenv("MEGAKERNEL_API_KEY", "sesame,open")
    settings = load_settings({})
    assert [key.get_secret_value() for key in settings.api_key] == ["sesame", "open"]
    assert "sesame" not in repr(settings)
    assert "sesame" not in refusal(config=config_file(""), api_key=["sesame", 5])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MEGAKERNEL_PORT", "tcp://10.0.0.1:8000"),
        ("MEGAKERNEL_SERVICE_HOST", "10.0.0.1"),
        ("MEGAKERNEL_SERVICE_PORT", "8000"),
        ("MEGAKERNEL_SERVICE_PORT_HTTP", "8000"),
        ("MEGAKERNEL_PORT_8000_TCP", "tcp://10.0.0.1:8000"),
        ("MEGAKERNEL_PORT_8000_TCP_ADDR", "10.0.0.1"),
        ("MEGAKERNEL_TEST_MODEL", "some.gguf"),
    ],
)
def test_what_kubernetes_and_tests_set_is_passed_over(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert load_settings({}).port == 8000


def test_cache_dir_follows_the_xdg_specification(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_cache_dir() == Path("/somewhere/megakernel")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache/megakernel"


def test_settings_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        load_settings({}).port = 1  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("asked", "on_terminal", "got"),
    [("auto", True, "console"), ("auto", False, "json"), ("console", False, "console"), ("json", True, "json")],
)
def test_log_format(monkeypatch, asked, on_terminal, got):
    monkeypatch.setattr("sys.stderr.isatty", lambda: on_terminal, raising=False)
    assert effective_log_format(load_settings({"log_format": asked})) == got


class TestResolve:
    @pytest.fixture
    def model_dir(self, tmp_path, monkeypatch):
        path = tmp_path / "tiny-llama"
        path.mkdir()
        (path / "config.json").write_text("{}")

        def locate(name, *, cache_dir, progress):
            return Path(name)

        monkeypatch.setattr("server.catalog.resolve", locate)
        return path

    def plan(self, **flags):
        return resolve(load_settings(flags), lambda phase, done, total: None)

    def test_every_engine_setting_reaches_the_runtime(self, model_dir):
        plan = self.plan(
            model=str(model_dir), backend="cpu", max_slots=3, max_model_len=512, max_step_tokens=64, page_size=32,
            pages=99, kv_memory="1MiB", threads=2, weight_format="int8", sm_reserve=4, idle_park_ms=5,
            random_weights=True, fake_script="{}",
        )  # fmt: skip
        spec = plan.runtime
        assert plan.model_path == model_dir
        assert (spec.backend, spec.model_path, spec.max_slots, spec.max_model_len_tokens) == (
            "cpu",
            str(model_dir),
            3,
            512,
        )
        assert (spec.max_step_tokens, spec.page_size_tokens, spec.n_pages, spec.kv_memory_bytes) == (64, 32, 99, 2**20)
        assert (spec.threads, spec.weight_format, spec.sm_reserve, spec.idle_park_ms) == (2, "int8", 4, 5)
        assert (spec.random_weights, spec.fake_script) == (True, "{}")

    def test_server_settings_reach_the_plan(self, model_dir):
        plan = self.plan(
            model=str(model_dir), host="::1", port=1, max_body="2KiB", request_deadline_seconds=5, max_concurrent_per_key=2,
            max_queue_requests=7, max_queue_tokens=70, prefix_cache=False, drain_seconds=1.5, metrics_public=False,
            cors_origin=["*"], log_level="debug", log_format="json",
        )  # fmt: skip
        assert (plan.host, plan.port, plan.drain_seconds, plan.metrics_public) == ("::1", 1, 1.5, False)
        assert (plan.cors_origins, plan.log_level, plan.log_format) == (("*",), "debug", "json")
        limits = plan.limits
        assert (limits.max_body_bytes, limits.request_deadline_seconds, limits.max_concurrent_per_key) == (2048, 5, 2)
        scheduler = plan.scheduler
        assert (scheduler.max_queue_requests, scheduler.max_queue_tokens, scheduler.prefix_cache) == (7, 70, False)

    def test_no_setting_is_left_out(self, model_dir):
        """Each setting but those about settings and places changes the plan."""
        default = self.plan(model=str(model_dir))
        for name, value in CHANGES.items():
            assert self.plan(**{"model": str(model_dir), name: value}) != default, name
        assert set(CHANGES) | {"config", "cache_dir", "model", "api_key_file"} == set(Settings.model_fields)

    @pytest.mark.parametrize(
        ("model", "names"),
        [
            ("smollm2-135m", ("smollm2-135m",)),
            ("SmolLM2", ("smollm2-135m", "SmolLM2")),
            ("org/Model-1B", ("org/Model-1B",)),
        ],
    )
    def test_a_model_is_served_under_its_own_name_and_the_one_asked_for(self, model_dir, model, names):
        assert self.plan(model=model).served_names == names

    def test_a_directory_is_served_under_its_last_part(self, model_dir):
        assert self.plan(model=f"{model_dir}/").served_names == ("tiny-llama",)

    def test_a_file_is_served_under_its_name(self, model_dir, tmp_path):
        (tmp_path / "Model.Q4_1.gguf").write_bytes(b"")
        assert self.plan(model=str(tmp_path / "Model.Q4_1.gguf")).served_names == ("Model.Q4_1",)

    def test_names_can_be_chosen(self, model_dir):
        assert self.plan(model=str(model_dir), served_model_name=["a", "b"]).served_names == ("a", "b")

    def test_keys_come_from_settings_and_file(self, model_dir, tmp_path):
        (tmp_path / "keys").write_text("two\nthree\n\none\n")
        plan = self.plan(model=str(model_dir), api_key=["one"], api_key_file=tmp_path / "keys")
        assert plan.api_keys == ("one", "two", "three")
        assert "three" not in repr(plan)

    @pytest.mark.parametrize("content", [None, ""])
    def test_a_key_file_without_keys_never_opens_the_server(self, model_dir, tmp_path, content):
        if content is not None:
            (tmp_path / "keys").write_text(content)
        with pytest.raises(ConfigError, match="API key file"):
            self.plan(model=str(model_dir), api_key_file=tmp_path / "keys")


CHANGES = {
    "served_model_name": ["x"], "host": "0.0.0.0", "port": 1, "api_key": ["k"], "metrics_public": False, "cors_origin": ["*"],
    "drain_seconds": 1, "max_body": 2048, "request_deadline_seconds": 1, "max_concurrent_per_key": 1,
    "max_queue_requests": 1, "max_queue_tokens": 1, "backend": "cpu", "max_slots": 1, "max_model_len": 1,
    "max_step_tokens": 1, "page_size": 1, "pages": 1, "kv_memory": 1, "prefix_cache": False, "threads": 1,
    "weight_format": "int8", "sm_reserve": 1, "idle_park_ms": 1, "log_level": "debug", "log_format": "console",
    "random_weights": True, "fake_script": "{}",
}  # fmt: skip
