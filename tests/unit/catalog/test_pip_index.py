"""Where pip would look: its settings as pip itself reads them, and project pages in both forms of the simple API."""

import subprocess
import sys

import msgspec
import pytest

from server.catalog import pip_index
from server.catalog.pip_index import IndexFault, PipSettings, find_wheel, pip_settings

WHEEL = "toy_model-1.0-py3-none-any.whl"
JSON = "application/vnd.pypi.simple.v1+json"


@pytest.fixture
def pip(monkeypatch, tmp_path):
    """pip with no settings but those of a test: returns a function that sets them, as variables or as its file."""
    monkeypatch.delenv("PIP_INDEX_URL")

    def configure(text=None, **variables):
        if text is not None:
            (tmp_path / "pip.conf").write_text(text)
            monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
        for name, value in variables.items():
            monkeypatch.setenv(f"PIP_{name.upper()}", value)

    return configure


class TestSettings:
    def test_without_settings_it_is_pip_s_own_default(self, pip):
        assert pip_settings() == PipSettings(("https://pypi.org/simple",))

    def test_variables_count_before_files(self, pip):
        pip("[global]\nindex-url = http://file.test/simple\n", index_url="http://variable.test/simple")
        assert pip_settings().index_urls[0] == "http://variable.test/simple"

    def test_settings_for_download_count_before_those_for_all(self, pip):
        pip("[global]\nindex-url = http://all.test/simple\n[download]\nindex-url = http://download.test/simple\n")
        assert pip_settings().index_urls[0] == "http://download.test/simple"

    def test_further_indexes_follow_each_once_and_only_those_over_http(self, pip):
        extra = "http://b.test/simple file:///srv/simple http://a.test/simple https://c.test/simple"
        pip(index_url="http://a.test/simple", extra_index_url=extra)
        assert pip_settings().index_urls == ("http://a.test/simple", "http://b.test/simple", "https://c.test/simple")

    def test_certificates_and_proxy_are_taken_over(self, pip):
        pip(cert="/certs/ca.pem", client_cert="/certs/own.pem", proxy="http://proxy.test:3128")
        held = pip_settings()
        assert (held.cert, held.client_cert, held.proxy) == (
            "/certs/ca.pem",
            "/certs/own.pem",
            "http://proxy.test:3128",
        )

    def test_a_python_without_pip_is_told(self, tmp_path, monkeypatch):
        bare = tmp_path / "bare"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
        monkeypatch.setattr(sys, "executable", str(bare / "bin" / "python"))
        with pytest.raises(IndexFault, match=r"pip cannot be asked for its index: .*No module named pip"):
            pip_settings()

    def test_a_pip_that_hangs_is_told(self, monkeypatch):
        monkeypatch.setattr(pip_index, "_PIP_WITHIN_S", 0.001)
        with pytest.raises(IndexFault, match=r"pip does not answer within 0\.001 s"):
            pip_settings()


class TestClient:
    def test_certificates_that_are_no_certificates_are_told(self, tmp_path):
        (tmp_path / "ca.pem").write_text("none")
        with pytest.raises(IndexFault, match="certificates that pip is configured for cannot be used"):
            PipSettings((), cert=str(tmp_path / "ca.pem")).client()
        with pytest.raises(IndexFault, match="No such file"):
            PipSettings((), client_cert=str(tmp_path / "missing.pem")).client()

    def test_a_proxy_is_used(self, site):
        """A proxy is asked for the whole URL; this one knows none, so the answer is its 404."""
        with PipSettings((), proxy=site.url).client() as client, pytest.raises(IndexFault, match="status 404"):
            find_wheel(client, ("http://index.test/simple",), "toy", WHEEL)
        assert site.asked == [("http://index.test/simple/toy/", None)]


def find(*index_urls, package="toy-model", wheel=WHEEL):
    with PipSettings(index_urls).client() as client:
        return find_wheel(client, index_urls, package, wheel)


def page_of(*links):
    return "".join(f'<a class="x" href="{link}">a file</a><a name="no-link">' for link in links).encode()


class TestPages:
    @pytest.mark.parametrize(
        ("link", "found"),
        [
            (f"{{site}}/f/{WHEEL}", f"{{site}}/f/{WHEEL}"),
            (f"../../f/{WHEEL}#sha256=00", f"{{site}}/f/{WHEEL}"),
            (f"{WHEEL}", f"{{site}}/simple/toy-model/{WHEEL}"),
            (f"/f/{WHEEL}?token=1", f"{{site}}/f/{WHEEL}?token=1"),
        ],
        ids=["absolute", "relative", "beside", "with a query"],
    )
    def test_html(self, site, link, found):
        site.put("/simple/toy-model/", page_of("other.whl", link.format(site=site.url)), "text/html")
        assert find(f"{site.url}/simple") == found.format(site=site.url)

    def test_json(self, site):
        files = [{"filename": "other.whl", "url": "o"}, {"filename": WHEEL, "url": f"../../f/{WHEEL}", "hashes": {}}]
        site.put("/simple/toy-model/", msgspec.json.encode({"meta": {}, "files": files}), JSON)
        assert find(f"{site.url}/simple") == f"{site.url}/f/{WHEEL}"

    @pytest.mark.parametrize("name", ["toy-model", "Toy_Model", "toy.model", "TOY__model"])
    def test_names_are_asked_for_in_their_normal_form(self, site, name):
        site.put("/simple/toy-model/", page_of(WHEEL), "text/html")
        assert find(f"{site.url}/simple/", package=name)

    def test_redirections_are_followed_and_links_start_from_where_they_lead(self, site):
        site.statuses["/simple/toy-model/"] = (301, {"Location": "/mirror/toy/"})
        site.put("/mirror/toy/", page_of(WHEEL), "text/html")
        assert find(f"{site.url}/simple") == f"{site.url}/mirror/toy/{WHEEL}"

    def test_the_next_index_is_asked_where_one_has_it_not(self, site):
        site.put("/empty/toy-model/", b'{"files": []}', JSON)
        site.put("/broken/toy-model/", b"{", JSON)
        site.put("/simple/toy-model/", page_of(WHEEL), "text/html")
        urls = (
            "http://127.0.0.1:1",
            f"{site.url}/none",
            f"{site.url}/empty",
            f"{site.url}/broken",
            f"{site.url}/simple",
        )
        assert find(*urls) == f"{site.url}/simple/toy-model/{WHEEL}"

    def test_each_index_s_reason_is_told_and_no_url_that_may_hold_a_password(self, site):
        site.put("/empty/toy-model/", b'{"files": []}', JSON)
        with pytest.raises(IndexFault) as caught:
            find("http://user:secret@127.0.0.1:1", f"{site.url}/none", f"{site.url}/empty")
        assert str(caught.value) == f"no answer (ConnectError); status 404; no file {WHEEL}"

    def test_no_index_is_told(self):
        with pytest.raises(IndexFault, match="no index over HTTP"):
            find()
