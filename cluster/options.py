"""The cluster's settings as flags of a command: ``ClusterConfig``'s fields are the one list of them.

``with_cluster_options`` runs once per command when the command line is assembled. The command itself receives the
finished ``ClusterConfig`` as its parameter ``config``.
"""

import functools
import inspect
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin

import typer
from pydantic import ByteSize
from pydantic.fields import FieldInfo

from cluster.config import SECRETS, ClusterConfig, flag_of

_CONFIG_FILE = "config_file"


def with_cluster_options(*, without: tuple[str, ...] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command a flag for every field of ``ClusterConfig``, and ``--config``.

    ``without`` names fields that the command sets by itself.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        fields = {name: field for name, field in ClusterConfig.model_fields.items() if name not in {*without, *SECRETS}}

        @functools.wraps(command)
        def load_and_run(**arguments: Any) -> None:
            flags = {name: arguments.pop(name) for name in fields}
            config_file: Path | None = arguments.pop(_CONFIG_FILE)
            # A command with a MODEL argument passes it on like the flag.
            model = arguments.pop("model_argument", None)
            if model is not None:
                if flags["model"] not in (None, model):
                    raise typer.BadParameter(f"MODEL is {model}, --model is {flags['model']}; give one of them")
                flags["model"] = model
            command(config=ClusterConfig.load(config_file, **flags), **arguments)

        own = [parameter for name, parameter in inspect.signature(command).parameters.items() if name != "config"]
        parameters = [*own, _config_file_option(), *(_option(name, field) for name, field in fields.items())]
        load_and_run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        load_and_run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return load_and_run

    return decorate


def _config_file_option() -> inspect.Parameter:
    help_text = (
        "YAML file with any of the settings below, as in block_size: 16. Each is also an environment variable, as in "
        "CROSSKV_BLOCK_SIZE. A flag comes before the environment, the environment before the file."
    )
    option = typer.Option("--config", help=help_text, rich_help_panel="Cluster")
    return _parameter(_CONFIG_FILE, Path, option)


def _option(name: str, field: FieldInfo) -> inspect.Parameter:
    flag = flag_of(name)
    kind = _flag_type(field)
    declaration = f"{flag}/--no-{flag.removeprefix('--')}" if kind is bool else flag
    default = "" if field.is_required() or field.default is None else f" (default: {_text(field.default)})"
    # Without a default of its own, a flag that is not given leaves the word to the environment and the YAML file.
    option = typer.Option(declaration, help=f"{field.description}{default}", rich_help_panel="Cluster")
    return _parameter(name, kind, option)


def _parameter(name: str, kind: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _flag_type(field: FieldInfo) -> Any:
    """Return the type that the command line shows; the configuration validates the value."""
    kind = field.annotation
    if kind is ByteSize or kind is None:
        return str
    if get_origin(kind) is Literal or isinstance(kind, type):
        return kind
    # ``T | None``: a flag that is not given is None already.
    return next(member for member in kind.__args__ if member is not type(None))


def _text(default: object) -> str:
    if isinstance(default, Enum):
        return str(default.value)
    if isinstance(default, ByteSize):
        return default.human_readable().replace(".0", "")
    return str(default)
