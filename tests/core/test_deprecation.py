"""Names of version 0.1 work with one warning that names the new one; docs/upgrade.md lists them."""

import importlib
import inspect
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dashinfer_vlm_core import Engine, EngineConfig, decoders, hookspecs, testing
from dashinfer_vlm_core.decoders import DecodeRequest, DecoderSupport, Token
from dashinfer_vlm_core.deprecation import RenamedAttribute, renamed_arguments
from dashinfer_vlm_core.engine import EngineStatus
from dashinfer_vlm_core.errors import UnsupportedParameter
from dashinfer_vlm_core.hookspecs import Finding, hookimpl
from dashinfer_vlm_core.plugins import load_plugins
from dashinfer_vlm_server import create_app
from dashinfer_vlm_server.settings import DrainState, Settings
from tests.pages import page_text

HELLO = {"messages": [{"role": "user", "content": "Hello."}]}
MODULES = {
    "dashinfer_vlm_core.decoders": {"GUIDE": "GUIDED_DECODING", "Fitness": "DecoderSupport", "Walk": "GrammarMatcher"},
    "dashinfer_vlm_core.decoders.interface": {"NotBegun": "RequestNotStarted", "Guide": "CompiledGrammar"},
    "dashinfer_vlm_core.engine": {"choose_decoder": "select_decoder", "open_conductor": "load_pipeline"},
    "dashinfer_vlm_core.engine.remote": {"error_of": "error_from_response"},
    "dashinfer_vlm_core.media": {"Picture": "Image", "Clip": "Video"},
    "dashinfer_vlm_core.models.interface": {"Span": "PlaceholderSpan"},
    "dashinfer_vlm_core.testing": {"Answer": "ScriptedResponse"},
    "dashinfer_vlm_server.settings": {"Gate": "DrainState"},
}


@contextmanager
def deprecations() -> Iterator[list[warnings.WarningMessage]]:
    """Record every DeprecationWarning of any thread."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", DeprecationWarning)
        yield warned


@pytest.mark.parametrize(
    ("module", "old", "new"), [(module, *names) for module, renamed in MODULES.items() for names in renamed.items()]
)
def test_renamed_name_of_module_warns(module, old, new):
    with pytest.warns(DeprecationWarning, match=rf"`{module}\.{old}` is now `{module}\.{new}`"):
        assert getattr(importlib.import_module(module), old) is getattr(importlib.import_module(module), new)


@pytest.mark.parametrize("module", MODULES)
def test_unknown_name_of_module_is_attribute_error(module):
    with pytest.raises(AttributeError, match="no_such_name"):
        importlib.import_module(module).no_such_name  # noqa: B018 - the access is the test


@pytest.mark.parametrize(
    ("old", "name", "new"),
    [
        ("dashinfer_vlm_core.engine.watch", "Watcher", "dashinfer_vlm_core.engine.observers"),
        ("dashinfer_vlm_server.keys", "Keys", "dashinfer_vlm_server.api_keys"),
    ],
)
def test_renamed_module_warns(old, name, new):
    with pytest.warns(DeprecationWarning, match=f"`{old}` is now `{new}`"):
        module = importlib.import_module(old)
    assert getattr(module, name).__module__ == new


def renamed_attributes():
    """Find the renamed attributes of all imported classes of this project."""
    modules = [module for name, module in sorted(sys.modules.items()) if name.startswith("dashinfer_vlm_core")]
    classes = {cls for module in modules for cls in vars(module).values() if isinstance(cls, type)}
    return sorted(
        (f"{cls.__module__}:{cls.__name__}", old)
        for cls in classes
        for old, value in vars(cls).items()
        if isinstance(value, RenamedAttribute)
    )


ATTRIBUTES = renamed_attributes()


def test_every_renamed_attribute_of_the_upgrade_page_is_found():
    assert len(ATTRIBUTES) == 27


@pytest.mark.parametrize(("owner", "old"), ATTRIBUTES)
def test_renamed_attribute_warns_and_is_on_the_upgrade_page(owner, old):
    module, name = owner.split(":")
    cls = getattr(sys.modules[module], name)
    rows = re.findall(r"^\|.*\|$", page_text("upgrade.md"), re.MULTILINE)
    with deprecations() as warned:
        renamed = vars(cls)[old].__get__(AnyAttribute(), cls)
    assert re.search(rf"(def {renamed}\(|\b{renamed}(:| =))", inspect.getsource(cls)), "the class has no such attribute"
    assert [str(warning.message).split("`")[1:4:2] for warning in warned] == [[f"{name}.{old}", f"{name}.{renamed}"]]
    assert [row for row in rows if re.search(rf"\b{old}\b", row) and re.search(rf"\b{renamed}\b", row)], (old, renamed)


class AnyAttribute:
    """An object each attribute of which is its own name."""

    def __getattr__(self, name):
        return name


def test_renamed_arguments_and_attributes_warn():
    with deprecations() as warned:
        token = Token(id=1, top=((1, -1.0),), finish="stop", cached=3)
        assert (token.top, token.finish, token.cached) == (((1, -1.0),), "stop", 3)
        finding = Finding(name="x", status="broken", detail="", mend="Run it again.")
        assert finding.mend == finding.fix == "Run it again."
        assert Settings(max_held_bytes=7).max_buffered_bytes == 7
        assert EngineStatus(state="failed", model="m", fatal_error="It died.").trouble == "It died."
        assert testing.Script("Hello.", honours=frozenset({"seed"})).supported_params == {"seed"}
        create_app(testing.scripted_engine("Hello.", honours=frozenset()), gate=DrainState())
    assert {str(warning.message).split("`")[1] for warning in warned} == {
        "Token(top=)", "Token(finish=)", "Token(cached=)", "Token.top", "Token.finish", "Token.cached",
        "Finding(mend=)", "Finding.mend", "Settings(max_held_bytes=)", "EngineStatus.trouble",
        "Script(honours=)", "scripted_engine(honours=)", "create_app(gate=)",
    }  # fmt: skip


def test_observer_that_overrides_answered_warns():
    from dashinfer_vlm_core.engine.observers import RequestObserver

    with pytest.warns(DeprecationWarning, match=r"`Old\.answered` is now `Old\.completed`"):

        class Old(RequestObserver):
            def answered(self, usage, seconds):
                self.seconds = seconds

    observer = Old()
    observer.completed(None, 2.0)
    assert observer.seconds == 2.0


def test_warning_points_at_caller():
    with deprecations() as warned:
        Token(id=1, top=()).top  # noqa: B018
        decoders.GUIDE  # noqa: B018
    assert {warning.filename for warning in warned} == {__file__}


def test_current_names_do_not_warn():
    token = Token(id=1, top_logprobs=((1, -1.0),))
    assert (token.top_logprobs, token.finish_reason) == (((1, -1.0),), None)


def test_renamed_argument_with_new_one_is_type_error():
    @renamed_arguments(old="new")
    def function(*, new=0):
        return new

    assert function(new=1) == 1
    with pytest.raises(TypeError, match="`old` and `new`"):
        function(old=1, new=2)


def test_renamed_method_is_called():
    class Example:
        old = RenamedAttribute("new")

        def new(self, value):
            return value + 1

    with pytest.warns(DeprecationWarning, match=r"`Example\.old` is now `Example\.new`"):
        assert Example().old(1) == 2


class OldDecoder:
    """A decoder as version 0.1 described it, which reads the old names of a request."""

    name = "old"
    honours = frozenset({"seed"})
    blind = "It reads text only: send no images."
    trouble = ""

    def __init__(self, spec, config):
        self._inner = testing.ScriptedDecoder(testing.Script("Hello."), spec=spec, config=config)
        self.max_model_len = self._inner.max_model_len

    async def start(self):
        await self._inner.start()

    async def close(self):
        await self._inner.close()

    async def decode(self, request: DecodeRequest):
        assert (request.guide, request.salt) == (None, "")
        async for token in self._inner.decode(request):
            yield Token(id=token.id, finish=token.finish_reason)


class OldPlugin:
    """A decoder's factory as version 0.1 described it."""

    name = "old"

    @hookimpl
    def register_decoders(self, register):
        register(self)

    def fitness(self, spec, config):
        return DecoderSupport(score=1000, reason="it is a test")

    def create(self, spec, config):
        return OldDecoder(spec, config)


def test_decoder_plugin_of_version_0_1_still_runs():
    registry = load_plugins(strict=True)
    with deprecations() as warned:
        registry.add_plugin(OldPlugin(), name="old")
        with Engine(EngineConfig(model="demo", decoder="old"), registry=registry) as engine:
            assert engine.chat(HELLO).choices[0].message.content == "Hello."
            image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
            with pytest.raises(UnsupportedParameter, match="send no images"):
                engine.chat({"messages": [{"role": "user", "content": [image]}]})
    names = {str(warning.message).split("`")[1] for warning in warned}
    assert {"DecoderFactory.fitness", "Decoder.honours", "Decoder.blind", "Decoder.trouble"} <= names
    assert hookspecs.API_VERSION == 2
