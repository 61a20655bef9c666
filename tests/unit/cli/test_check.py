"""`megakernel check`: shows the probe's findings, survives its breakdown, and ends with the right exit code."""

import io
import json

import pytest
from rich.console import Console

from server.cli import check as checking
from server.cli.check import Finding, can_serve, probe, report

CPU = Finding("backend cpu", "ok", "runs on every machine")
NO_GPU = Finding("backend graphs", "no", "needs a CUDA GPU")
NO_TORCH = Finding("PyTorch", "no", "not installed", "pip install 'torch[x]'")


@pytest.mark.parametrize(
    ("findings", "able"),
    [
        ((CPU,), True),
        ((CPU, NO_GPU), True),
        ((CPU, Finding("Models", "note", "none")), True),
        ((NO_GPU,), False),
        ((NO_TORCH, CPU), False),
        ((), False),
    ],
)
def test_what_it_takes_to_serve(findings, able):
    assert can_serve(findings) is able


def test_the_report_shows_detail_and_remedy():
    console = Console(file=io.StringIO(), width=100)
    console.print(report((CPU, NO_TORCH, Finding("GPU", "note", "[none]"))))
    text = console.file.getvalue()
    assert "✓  backend cpu  runs on every machine" in text
    assert "✗  PyTorch" in text
    assert "→ pip install 'torch[x]'" in text
    assert "[none]" in text


def test_a_probe_that_breaks_is_a_finding():
    (found,) = probe("megakernel_runtime.no_such_module")
    assert found.state == "no"
    assert "No module named" in found.detail


def test_a_probe_that_hangs_is_a_finding(monkeypatch):
    monkeypatch.setattr(checking, "PROBE_WITHIN_S", 0.001)
    (found,) = probe()
    assert "hangs" in found.detail


@pytest.mark.parametrize(("findings", "code"), [((CPU,), 0), ((NO_TORCH,), 1)])
@pytest.mark.parametrize("as_json", [True, False])
def test_exit_code_and_form(monkeypatch, capsys, findings, code, as_json):
    import typer

    monkeypatch.setattr(checking, "probe", lambda: findings)
    monkeypatch.setattr(checking, "cached_models", lambda: (Finding("Models", "note", "none fetched yet"),))
    with pytest.raises(typer.Exit) as left:
        checking.check(as_json=as_json)
    assert left.value.exit_code == code
    text = capsys.readouterr().out
    if as_json:
        assert [item["topic"] for item in json.loads(text)] == [findings[0].topic, "Models"]
    else:
        assert findings[0].topic in text
