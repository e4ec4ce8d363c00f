"""A checkpoint's chat template, rendered as transformers does: Jinja in a sandbox, with what templates may use there.

Not by transformers itself, whose import takes a quarter of the time until a small model is ready.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from ..errors import CheckpointError, ConfigError, InvalidParameter

logger: logging.Logger = logging.getLogger(__name__)

DEFAULT, WITH_TOOLS = "default", "tool_use"
"""Names of templates where there are several, as transformers knows them."""

FAILURES = (TypeError, ValueError, ArithmeticError, AttributeError, LookupError)
"""What the expressions of a template raise, beside Jinja's own errors."""


class ChatTemplate:
    """Turns messages into the text that a model was trained on; may be used from several threads.

    Attributes:
        knows_tools: whether it tells the model of tools.
    """

    def __init__(self, sources: Mapping[str, str], names: Mapping[str, str]) -> None:
        """
        Args:
            sources: templates by their names; with tools the one of `WITH_TOOLS` is taken, if there is one.
            names: what else templates may write by name, such as `eos_token`.

        Raises:
            ConfigError: one is no Jinja template, or there is none for plain conversations.
        """
        if DEFAULT not in sources:
            raise ConfigError(
                f"The checkpoint has chat templates named {', '.join(sorted(sources))} and none named {DEFAULT}:"
                " choose one by --chat-template."
            )
        environment = _environment()
        try:
            self._templates = {name: environment.from_string(source) for name, source in sources.items()}
        except jinja2.TemplateError as error:
            raise unusable(error) from error
        self.knows_tools: bool = WITH_TOOLS in sources or "tools" in jinja2.meta.find_undeclared_variables(
            environment.parse(sources[DEFAULT])
        )
        self._names = dict(names)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()) -> str:
        """The text for `messages` and `tools` (plain JSON values), ready for an answer.

        Raises:
            InvalidParameter: the template refuses them.
        """
        name = WITH_TOOLS if tools and WITH_TOOLS in self._templates else DEFAULT
        try:
            return self._templates[name].render(
                **self._names,
                # Templates test whether a key is there, and write "None" for one that is but has no value.
                messages=[{key: value for key, value in message.items() if value is not None} for message in messages],
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=True,
            )
        except (jinja2.TemplateError, *FAILURES) as error:
            raise _refused(error) from error


def read_chat_template(
    folder: Path, override: Path | None, own: Mapping[str, str], names: Mapping[str, str]
) -> ChatTemplate:
    """The operator's template, else the ones in files of their own in the checkpoint, else the tokenizer's `own`.

    Raises:
        CheckpointError: there is none, or a file of the checkpoint cannot be read.
        ConfigError: the operator's file cannot be read, or what was read is no template.
    """
    if override is not None:
        try:
            return ChatTemplate({DEFAULT: override.read_text(encoding="utf-8")}, names)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"chat_template: {override} cannot be read: {error}.") from error
    try:
        files = _files(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"The chat template in {folder} cannot be read: {error!r}. Download it again.") from error
    sources = files if DEFAULT in files else {**own, **files}
    if not sources:
        raise CheckpointError(
            f"{folder} has no chat template: use an instruct checkpoint, or give one by --chat-template."
        )
    return ChatTemplate(sources, names)


def unusable(cause: BaseException) -> ConfigError:
    """What the operator is told of a template with which nothing can be rendered."""
    return ConfigError(f"The chat template cannot be used: {cause}. Mend it, or give another one.")


def _files(folder: Path) -> dict[str, str]:
    """Templates of a checkpoint that have files of their own."""
    more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    sources = {path.stem: path.read_text(encoding="utf-8") for path in more}
    text, wrapped = folder / "chat_template.jinja", folder / "chat_template.json"
    if text.is_file():
        sources[DEFAULT] = text.read_text(encoding="utf-8")
    elif wrapped.is_file():
        sources[DEFAULT] = str(json.loads(wrapped.read_text(encoding="utf-8"))["chat_template"])
    return sources


def _environment() -> jinja2.sandbox.SandboxedEnvironment:
    """Where templates run: they come with checkpoints, and reach nothing but what they are given."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _as_json
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": _now,
        "namespace": _Namespace,
    }
    return environment


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the model wrote, for trainers; here it is text like any other."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own way of naming them

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _Namespace(jinja2.utils.Namespace):
    """Values that outlive a loop; none with a name that means something to Python."""

    def __init__(self, /, *args: Any, **values: Any) -> None:
        named = dict(*args, **values)
        for name in named:
            _check_name(name)
        super().__init__(named)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace holds no names that begin with _, such as {name!r}")


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _as_json(value: Any, **options: Any) -> str:
    """Jinja's own writes < and & for HTML."""
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)  # local: templates tell the date of today


def _refused(error: Exception) -> InvalidParameter:
    """A refusal in the template's own words, if it has chosen any; Jinja's are for the operator's log."""
    if type(error) is jinja2.TemplateError:  # by `raise_exception`; Jinja itself raises subclasses
        return InvalidParameter(f"The model's chat template refuses these messages: {error}", param="messages")
    # Not Jinja's text: it may quote the request.
    logger.warning("the chat template failed on a request with %s", type(error).__name__)
    return InvalidParameter(
        "The model's chat template cannot render these messages: leave out what is unusual in them.", param="messages"
    )
