"""Render a checkpoint's chat template as transformers does: sandboxed Jinja with the same extensions and globals.

transformers itself is not used, because its import takes a quarter of a small model's startup time.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2 import ext, meta, nodes, parser, sandbox, utils

from ..errors import CheckpointError, ConfigError, InvalidParameter
from .conversation import HERMES, QWEN_XML, ConversationFormat

logger: logging.Logger = logging.getLogger(__name__)

DEFAULT = "default"
TOOL_USE = "tool_use"
"""transformers' name of the template for requests with tools, in checkpoints with several templates."""

RESERVED_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Variables of a template that this module sets."""

EXPRESSION_ERRORS = (TypeError, ValueError, ArithmeticError, AttributeError, LookupError)
"""Exceptions that expressions in a template raise, in addition to Jinja's own."""


class ChatTemplate:
    """A chat template that renders messages to prompt text; thread-safe.

    Attributes:
        supports_tools: whether the template renders tools.
        options: the variables that a request may set, such as `enable_thinking`.
    """

    def __init__(self, sources: Mapping[str, str], variables: Mapping[str, str]) -> None:
        """
        Args:
            sources: templates by name; `TOOL_USE`, if present, is used for requests with tools.
            variables: other variables that templates may use, such as `eos_token`.

        Raises:
            ConfigError: a template is not valid Jinja, or `DEFAULT` is missing.
        """
        if DEFAULT not in sources:
            raise ConfigError(
                f"The checkpoint has chat templates named {', '.join(sorted(sources))}, but none named {DEFAULT}:"
                " select one with --chat-template."
            )
        self._sources = tuple(sources.values())
        try:
            self._templates = {name: _compile(source) for name, source in sources.items()}
        except jinja2.TemplateError as error:
            raise template_config_error(error) from error
        used = {name: template.variables for name, template in self._templates.items()}
        self.supports_tools: bool = TOOL_USE in sources or "tools" in used[DEFAULT]
        self._variables = dict(variables)
        self.options: frozenset[str] = frozenset().union(*used.values()) - {*RESERVED_VARIABLES, *variables}

    def mentions(self, text: str) -> bool:
        """Return whether a template contains `text`."""
        return any(text in source for source in self._sources)

    def conversation(self, default: ConversationFormat) -> ConversationFormat:
        """Return the format in which the template writes tool calls: `default`, or XML instead of Hermes."""
        return QWEN_XML if default == HERMES and self.mentions("<parameter=") else default

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] = (),
        options: Mapping[str, Any] = MappingProxyType({}),
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Render `messages` and `tools` (plain JSON values).

        Args:
            messages: the messages.
            tools: the available tools.
            options: values of variables in `options` of this class.
            add_generation_prompt: whether the text ends with the beginning of a response.

        Raises:
            InvalidParameter: the template rejects them.
        """
        name = TOOL_USE if tools and TOOL_USE in self._templates else DEFAULT
        try:
            return self._templates[name].code.render(
                **{**options, **self._variables},
                messages=messages,
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except (jinja2.TemplateError, *EXPRESSION_ERRORS) as error:
            raise _render_error(error) from error


def read_chat_template(
    folder: Path, override: Path | None, tokenizer_templates: Mapping[str, str], variables: Mapping[str, str]
) -> ChatTemplate:
    """Read the `override` file, else the checkpoint's template files, else `tokenizer_templates`.

    Raises:
        CheckpointError: the checkpoint has no chat template, or one of its files cannot be read.
        ConfigError: the `override` file cannot be read, or a template is not valid.
    """
    if override is not None:
        try:
            return ChatTemplate({DEFAULT: override.read_text(encoding="utf-8")}, variables)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"chat_template: {override} cannot be read: {error}.") from error
    try:
        files = _read_files(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"The chat template in {folder} cannot be read: {error!r}. Download it again.") from error
    sources = files if DEFAULT in files else {**tokenizer_templates, **files}
    if not sources:
        raise CheckpointError(
            f"{folder} has no chat template: use an instruct checkpoint, or set one with --chat-template."
        )
    return ChatTemplate(sources, variables)


def template_mentions(folder: Path, texts: Sequence[str]) -> bool:
    """Return whether a chat template of a checkpoint contains one of `texts`; False if none can be read, which loading
    the tokenizer reports."""
    try:
        path = folder / "tokenizer_config.json"
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        sources = [*_read_files(folder).values(), json.dumps(config.get("chat_template"), ensure_ascii=False)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return any(text in source for source in sources for text in texts)


def template_config_error(cause: BaseException) -> ConfigError:
    """Create the error for a template that cannot be rendered at all."""
    return ConfigError(f"The chat template cannot be used: {cause}. Fix it, or set another one with --chat-template.")


def _read_files(folder: Path) -> dict[str, str]:
    additional = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    sources = {path.stem: path.read_text(encoding="utf-8") for path in additional}
    jinja_file = folder / "chat_template.jinja"
    json_file = folder / "chat_template.json"
    if jinja_file.is_file():
        sources[DEFAULT] = jinja_file.read_text(encoding="utf-8")
    elif json_file.is_file():
        sources[DEFAULT] = str(json.loads(json_file.read_text(encoding="utf-8"))["chat_template"])
    return sources


class _Template(NamedTuple):
    """A compiled template, and the variables that it reads."""

    code: jinja2.Template
    variables: frozenset[str]


@functools.lru_cache(maxsize=16)  # engines of one process often have the same template
def _compile(source: str) -> _Template:
    environment = _environment()
    tree = environment.parse(source)
    used = meta.find_undeclared_variables(tree)
    return _Template(environment.from_string(tree), frozenset(used - environment.globals.keys()))


def _environment() -> sandbox.SandboxedEnvironment:
    # Templates come from untrusted checkpoints, and access only their variables.
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now, "namespace": _Namespace}
    return environment


class _Generation(ext.Extension):
    """`{% generation %}` marks the model's output for training; here it has no effect."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's interface

    def parse(self, parser: parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Namespace(utils.Namespace):
    """Variables that outlive a loop; rejects names that begin with an underscore, which Python may treat specially."""

    def __init__(self, /, *args: Any, **values: Any) -> None:
        super().__init__()
        for name, value in dict(*args, **values).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace must not have names that begin with _, got {name!r}")
        super().__setitem__(name, value)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, **options: Any) -> str:
    # Unlike Jinja's filter, this does not escape < and & for HTML.
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)  # local time: templates render today's date


def _render_error(error: Exception) -> InvalidParameter:
    if type(error) is jinja2.TemplateError:  # by `raise_exception`; Jinja itself raises subclasses
        return InvalidParameter(f"The model's chat template rejects these messages: {error}", param="messages")
    # Jinja's text may quote the request, so it is not logged.
    logger.warning("The chat template failed on a request with %s", type(error).__name__)
    return InvalidParameter(
        "The model's chat template cannot render these messages: check their roles, their order and their content.",
        param="messages",
    )
