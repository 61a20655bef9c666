"""The terminal chat: what it asks of a server, what it shows, and how it takes interruptions and faults."""

import io
import json

import httpx
import pytest
from rich.console import Console

from server.cli.chat import Conversation, converse, printable, summary
from server.cli.client import Answer, ChatClient, ChatError


def chunk(text=None, finish=None, usage=None, choices=True):
    choice = {"index": 0, "delta": {"content": text} if text is not None else {}, "finish_reason": finish}
    counts = {"prompt_tokens": 9, "completion_tokens": usage} if usage else None
    return "data: " + json.dumps({"choices": [choice] if choices else [], "usage": counts}) + "\n\n"


STREAM = ": keep-alive\n\n" + chunk("", usage=None) + chunk("Hel", usage=1) + chunk("lo", usage=2) + chunk(finish="stop") + chunk(usage=2, choices=False) + "data: [DONE]\n\n"  # fmt: skip


class Server:
    """Answers requests from a script and remembers them."""

    def __init__(self, body=STREAM, status=200):
        self.body, self.status, self.requests = body, status, []

    def __call__(self, request):
        if request.url.path == "/v1/models":
            return httpx.Response(self.status, json={"data": [{"id": "tiny"}, {"id": "alias"}]})
        self.requests.append(json.loads(request.content))
        self.headers = request.headers
        content = self.body.encode() if isinstance(self.body, str) else self.body
        return httpx.Response(self.status, content=content)


def client_of(server, **kwargs):
    return ChatClient("http://test", transport=httpx.MockTransport(server), **kwargs)


def talk(server, *lines, conversation=None):
    """Run a conversation over `lines`; return what the terminal showed, and the conversation."""
    left = list(lines)
    conversation = conversation or Conversation("tiny", "", {})

    class Terminal(Console):
        def input(self, *args, **kwargs):
            if not left:
                raise EOFError
            line = left.pop(0)
            if line is KeyboardInterrupt:
                raise KeyboardInterrupt
            return line

    terminal = Terminal(file=io.StringIO(), width=120)
    converse(client_of(server), conversation, terminal)
    return terminal.file.getvalue(), conversation


def test_streams_and_counts():
    answer = Answer()
    server = Server()
    assert list(client_of(server).stream(answer, model="tiny", messages=[])) == ["Hel", "lo"]
    assert (answer.text, answer.finish_reason, answer.prompt_tokens, answer.completion_tokens) == (
        "Hello",
        "stop",
        9,
        2,
    )
    assert server.requests[0]["stream"] is True
    assert answer.started < answer.first_text < answer.last_text


@pytest.mark.parametrize("url", ["http://test", "http://test/", "http://test/v1", "http://test/v1/"])
def test_any_spelling_of_the_url_will_do(url):
    server = Server()
    client = ChatClient(url, transport=httpx.MockTransport(server))
    assert client.served_model() == "tiny"


def test_the_key_is_sent():
    server = Server()
    list(client_of(server, api_key="sesame").stream(Answer(), model="tiny"))
    assert server.headers["authorization"] == "Bearer sesame"


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        ('{"error": {"message": "no such model"}}', 404, r"no such model \(HTTP 404\)"),
        ("<html>", 502, "HTTP 502"),
        (chunk("a") + 'data: {"error": {"message": "engine died"}}\n\ndata: [DONE]\n\n', 200, "engine died"),
    ],
)
def test_refusals_and_faults_are_told(body, status, told):
    with pytest.raises(ChatError, match=told):
        list(client_of(Server(body, status)).stream(Answer(), model="tiny"))


def test_no_server_is_told():
    def refuse(request):
        raise httpx.ConnectError("refused")

    client = ChatClient("http://test", transport=httpx.MockTransport(refuse))
    with pytest.raises(ChatError, match="no server answers"):
        client.served_model()
    with pytest.raises(ChatError, match="lost"):
        list(client.stream(Answer(), model="tiny"))


def test_a_refused_model_list_is_told():
    with pytest.raises(ChatError, match="HTTP 401"):
        client_of(Server(status=401)).served_model()


def test_the_conversation_is_sent_whole():
    server = Server()
    shown, conversation = talk(
        server, "/system Be brief.", "Hi", "", "Again", conversation=Conversation("tiny", "", {"seed": 1})
    )
    assert [m["content"] for m in server.requests[1]["messages"]] == ["Be brief.", "Hi", "Hello", "Again"]
    assert [m["role"] for m in server.requests[1]["messages"]] == ["system", "user", "assistant", "user"]
    assert server.requests[1]["seed"] == 1
    assert len(conversation.turns) == 4
    assert "Hello" in shown
    assert "2 tokens" in shown


def test_reset_forgets():
    server = Server()
    talk(server, "Hi", "/reset", "Hi")
    assert len(server.requests[1]["messages"]) == 1


def test_system_prompt_can_be_removed():
    server = Server()
    talk(server, "/system", "Hi", conversation=Conversation("tiny", "Be brief.", {}))
    assert len(server.requests[0]["messages"]) == 1


def test_quit_leaves_and_unknown_commands_help():
    shown, _ = talk(Server(), "/what", "/help", "/quit", "never sent")
    assert "no command /what" in shown
    assert shown.count("/reset") == 2


def test_ctrl_c_at_the_prompt_goes_on():
    server = Server()
    talk(server, KeyboardInterrupt, "Hi")
    assert len(server.requests) == 1


def test_ctrl_c_stops_an_answer_and_keeps_what_came():
    class Interrupted(httpx.SyncByteStream):
        closed = False

        def __iter__(self):
            yield chunk("Hel", usage=1).encode()
            raise KeyboardInterrupt

        def close(self):
            Interrupted.closed = True

    def answer(request):
        return httpx.Response(200, stream=Interrupted())

    shown, conversation = talk(answer, "Hi")
    assert "stopped" in shown
    assert "1 tokens" in shown
    assert conversation.turns[-1]["content"] == "Hel"
    assert Interrupted.closed


def test_a_failed_question_is_not_kept():
    shown, conversation = talk(Server("[no markup]", 500), "Hi")
    assert "HTTP 500" in shown
    assert conversation.turns == []


def test_answers_cannot_command_the_terminal():
    server = Server(chunk("a\x1b]0;title\x07[bold]b\r", usage=1) + "data: [DONE]\n\n")
    shown, _ = talk(server, "Hi")
    assert "\x1b" not in shown
    assert "a]0;title[bold]b" in shown
    assert printable("é\n\t漢\x9b") == "é\n\t漢"


@pytest.mark.parametrize(
    ("answer", "note", "line"),
    [
        (Answer(0.0, 0.25, 1.25, "x", "stop", 5, 51), "", "51 tokens · 50.0 tokens/s · first token 250 ms"),
        (Answer(0.0, 0.25, 1.25, "x", "length", 5, 1), "", "1 tokens · first token 250 ms · cut at the token limit"),
        (Answer(0.0, 0.25, 0.25, "x", None, 5, 2), "stopped", "2 tokens · first token 250 ms · stopped"),
        (Answer(0.0), "", "no text"),
    ],
)
def test_summary(answer, note, line):
    assert summary(answer, note) == line


class TestCommand:
    """`megakernel chat` as a whole, with its connection and its child server replaced."""

    @pytest.fixture
    def server(self, monkeypatch):
        server, self.made = Server(), []

        def make(url, api_key):
            self.made.append((url, api_key))
            return client_of(server, api_key=api_key)

        monkeypatch.setattr("server.cli.chat.ChatClient", make)
        monkeypatch.setattr("server.cli.chat.out", Console(file=io.StringIO(), width=120))
        return server

    @pytest.fixture
    def child(self, monkeypatch):
        from contextlib import contextmanager

        from server.cli.child import ChildServer

        events = []

        @contextmanager
        def child_server(arguments, on_phase):
            on_phase("weights")
            events.append(arguments)
            yield ChildServer("http://own", "secret")
            events.append("ended")

        monkeypatch.setattr("server.cli.child.child_server", child_server)
        return events

    def chat(self, monkeypatch, *arguments, lines="Hi\n/quit\n"):
        from typer.testing import CliRunner

        from server.cli.app import app

        return CliRunner().invoke(app, ["chat", *arguments], input=lines)

    def test_asks_the_server_that_is_named(self, monkeypatch, server):
        result = self.chat(
            monkeypatch, "--url", "http://there", "--seed", "7", "--max-tokens", "5", "--system", "Brief."
        )
        assert result.exit_code == 0, result.output
        assert self.made == [("http://there", "")]
        request = server.requests[0]
        assert (request["model"], request["seed"], request["max_tokens"]) == ("tiny", 7, 5)
        assert request["messages"][0] == {"role": "system", "content": "Brief."}
        assert request["temperature"] == 0.7

    def test_the_key_may_stand_in_the_environment(self, monkeypatch, server):
        monkeypatch.setenv("MEGAKERNEL_API_KEY", "sesame")
        self.chat(monkeypatch, "--url", "http://there")
        assert self.made == [("http://there", "sesame")]

    @pytest.mark.parametrize(("arguments", "passed_on"), [((), ()), (("--model", "x"), ("--model", "x"))])
    def test_starts_a_server_of_its_own_and_ends_it(self, monkeypatch, server, child, arguments, passed_on):
        result = self.chat(monkeypatch, *arguments)
        assert result.exit_code == 0, result.output
        assert child == [passed_on, "ended"]
        assert self.made == [("http://own", "secret")]
        assert server.requests[0]["model"] == "tiny"
