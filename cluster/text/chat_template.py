"""A checkpoint's chat template: Jinja source that turns a conversation into the text of a prompt.

The front end compiles one ``ChatTemplate`` when it starts. The source comes from whoever published the checkpoint, so
it runs in Jinja's sandbox, with a budget of steps and sizes for each rendering. What templates may use is what Hugging
Face documents for them: https://huggingface.co/docs/transformers/chat_templating_writing
"""

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from cluster.errors import CrosskvError

_MAX_STEPS = 1_000_000
_MAX_SIZE = 16 << 20
_SIZE_PER_STEP = 4096
_STEPS_PER_CALL = 10
_MAX_INTEGER_BITS = 512
_WIDE = re.compile(r"\*|\d{5}")
_BUDGET = "budget of this rendering"  # not an identifier: templates cannot name it


class ChatTemplateError(CrosskvError):
    """The template itself cannot be compiled."""


class ConversationError(ValueError):
    """The template refuses this conversation, or fails on it."""


class ChatTemplate:
    """Renders conversations. Nothing in it changes after construction; several threads may use it."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile ``source``; ``special_tokens`` (``bos_token`` and so on) are variables of the template."""
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _Environment().from_string(source)
            self.knows_tools = "tools" in meta.find_undeclared_variables(_Environment().parse(source))
        except (jinja2.TemplateError, RecursionError, MemoryError, SyntaxError) as error:
            raise ChatTemplateError(f"the model's chat template does not compile: {error}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt's text; raise ``ConversationError`` with the template's own words.

        ``continue_final_message`` ends the prompt with the last message's content, to be continued by the model.
        ``tools`` are what the model may call, if the template ``knows_tools``. ``variables`` are further names for the
        template; they do not replace the ones set here.
        """
        context: dict[str, Any] = {"tools": None, "documents": None}
        context |= variables or {}
        context |= {"tools": tools} if tools is not None else {}
        context |= self._special_tokens
        context |= {"messages": messages, "add_generation_prompt": add_generation_prompt, _BUDGET: _Budget()}
        try:
            text = _bounded_join(self._template.generate(context))
        except jinja2.TemplateError as error:
            raise ConversationError(f"the chat template refuses these messages: {error}") from None
        except (
            RecursionError,
            MemoryError,
            ArithmeticError,
            LookupError,
            TypeError,
            ValueError,
            AttributeError,
        ) as error:
            raise ConversationError(f"the chat template fails on these messages: {error!r:.200}") from None
        return _up_to_final_content(text, messages) if continue_final_message else text


class _Budget:
    """What one rendering may still spend on iterations, calls and copies."""

    def __init__(self) -> None:
        self._steps = _MAX_STEPS

    def spend(self, steps: int = 1) -> None:
        self._steps -= steps
        if self._steps < 0:
            raise jinja2.TemplateRuntimeError(f"it takes more than {_MAX_STEPS} steps")

    def spend_on_size(self, size: int) -> None:
        """Pay for a value of ``size`` characters or elements before it is made."""
        if size > _MAX_SIZE:
            raise jinja2.TemplateRuntimeError(f"it makes a value of more than {_MAX_SIZE} characters or elements")
        self.spend(1 + size // _SIZE_PER_STEP)


class _GenerationTag(Extension):
    """``{% generation %}`` marks what a model wrote, which matters in training only: its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - declared as an instance's set by Jinja

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with Hugging Face's names, and with what repeats or grows counted against the budget."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"])
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.filters["tojson"] = _tojson
        for name, function in self.filters.items():
            self.filters[name] = _without_huge_integers(function)
        self.filters["counted"] = _counted
        self.filters["concatenated"] = _concatenated

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template: nodes.Template = _Accounting().visit(super()._parse(source, name, filename))
        template.set_environment(self)
        return template

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as in Jinja
        __context[_BUDGET].spend(_STEPS_PER_CALL)
        # Methods of str pad and repeat; so do the range() and batch() of this world.
        if not isinstance(__obj, jinja2.runtime.Macro):
            _check_integers(args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_widths(value.__self__)
        return wrapped

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        context[_BUDGET].spend_on_size(_size_of_result(operator, left, right))
        return super().call_binop(context, operator, left, right)


class _Accounting(NodeTransformer):
    """Sends every loop's items and every ``a ~ b`` through a filter that pays for them."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - Jinja's naming
        self.generic_visit(node)
        node.iter = _filter(node.iter, "counted")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), "concatenated")


def _filter(node: nodes.Node, name: str) -> nodes.Filter:
    assert isinstance(node, nodes.Expr), "only expressions are iterated or joined"
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


@jinja2.pass_context
def _counted(context: Context, items: Iterable[Any]) -> Iterable[Any]:
    if isinstance(items, Undefined):
        return items
    budget: _Budget = context[_BUDGET]

    def each() -> Iterator[Any]:
        for item in items:
            budget.spend()
            yield item

    return each()


@jinja2.pass_context
def _concatenated(context: Context, parts: list[Any]) -> str:
    texts = [str(part) for part in parts]
    context[_BUDGET].spend_on_size(sum(map(len, texts)))
    return "".join(texts)


def _size_of_result(operator: str, left: Any, right: Any) -> int:
    """Return an upper bound, in characters or elements, of what the operator makes of growing kinds; 0 of others."""
    sized = (str, list, tuple)
    match operator:
        case "+" if isinstance(left, sized) and isinstance(right, sized):
            return len(left) + len(right)
        case "*" if isinstance(left, sized) and isinstance(right, int):
            return len(left) * max(right, 0)
        case "*" if isinstance(right, sized) and isinstance(left, int):
            return len(right) * max(left, 0)
        case "%" if isinstance(left, str):
            _check_widths(left)
            return len(left) + len(str(right))
        case "*" if isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() + right.bit_length())
        case "**" if isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * max(right, 0))
    return 0


def _check_widths(format: str) -> None:
    if _WIDE.search(format):
        raise jinja2.TemplateRuntimeError(
            f"it formats with a width that is given elsewhere or too large: {format!r:.100}"
        )


def _check_bits(bits: int) -> None:
    if bits > _MAX_INTEGER_BITS:
        raise jinja2.TemplateRuntimeError(f"it makes an integer of more than {_MAX_INTEGER_BITS} bits")


def _check_integers(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and abs(value) > _MAX_SIZE:
            raise jinja2.TemplateRuntimeError(f"it passes {value:.3e}, which is beyond {_MAX_SIZE}, to a function")


def _without_huge_integers(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # keeps Jinja's mark of filters that want the context
    def checked(*args: Any, **kwargs: Any) -> Any:
        _check_integers(args[1:], kwargs)
        return function(*args, **kwargs)

    return checked


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _bounded_join(pieces: Iterable[str]) -> str:
    kept: list[str] = []
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > _MAX_SIZE:
            raise jinja2.TemplateRuntimeError(f"it writes more than {_MAX_SIZE} characters")
        kept.append(piece)
    return "".join(kept)


def _up_to_final_content(text: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """Cut what the template writes after the final message's content, such as the mark that ends a turn."""
    content = str(messages[-1]["content"]).lstrip()
    for wanted in (content, content.rstrip()):  # many templates trim what they are given
        start = text.rfind(wanted)
        if wanted and start >= 0:
            return text[: start + len(wanted)]
    raise ConversationError("continue_final_message: the chat template does not render the final message's content")
