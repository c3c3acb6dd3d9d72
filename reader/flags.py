"""A command's flags: the parameters of its function in Python, and of the function that prints the result."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import json
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

from beam_pipeline import __version__
from beam_pipeline.errors import EXIT_OK, EXIT_USAGE, CorruptRecordError, ImageShardsError, UsageError
from beam_pipeline.text import meant, print_line
from reader import with_install_hint
from reader.select import parse_classes
from reader.training.options import TrainOptions

_WIDTH = 100


class Parser(argparse.ArgumentParser):
    """An argument parser that raises UsageError and takes no abbreviations."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message.removeprefix('argument ')}; see --help")


class Given(NamedTuple):
    """What a command line says.

    Attributes:
        command: all of it.
        json: whether the answer is a JSON object.
        function: of the command in Python.
        arguments: of the function.
    """

    command: str
    json: bool
    function: Callable[..., Any]
    arguments: dict[str, Any]

    def call(self, **others: Any) -> Any:
        """What the command's function returns."""
        return self.function(**self.arguments, **others)

    def print(self, document: Any, text: str) -> None:
        """Print the answer."""
        print_line(json.dumps(document) if self.json else text)


class _Verb(NamedTuple):
    run: Callable[..., int]
    home: str  # the module of its function, "" if it has none
    summary: str
    details: str
    example: str
    exit_codes: str

    @property
    def name(self) -> str:
        return self.run.__name__.removeprefix("_")

    @property
    def function(self) -> Callable[..., Any]:
        """Its function in Python; one without parameters if there is none."""
        return getattr(importlib.import_module(self.home), self.name) if self.home else lambda: None


class Commands:
    """Every command but `write`.

    Args:
        help: of each parameter the placeholder of its value, and a sentence on it, to which its default is added; of
            one command's only, if its name is before it. Parameters that aren't here are for Python.
        positional: those that are no flag, and how often each may come.
    """

    def __init__(self, help: Mapping[str, tuple[str, str]], positional: Mapping[str, str | None]) -> None:
        self._help, self._positional = help, positional
        self._verbs: dict[str, _Verb] = {}

    def verb(self, *texts: str, home: str = "") -> Callable[[Callable[..., int]], Callable[..., int]]:
        """Makes a function that takes a `Given`, and flags of its own, a command.

        Args:
            texts: a summary, details, an example, and the exit codes.
            home: the module of the command's function in Python.
        """

        def add(run: Callable[..., int]) -> Callable[..., int]:
            made = _Verb(run, home, *texts)
            self._verbs[made.name] = made
            return run

        return add

    def parser(self, name: str) -> Parser:
        """The parser of a command's flags."""
        verb = self._verbs[name]
        made = Parser(
            prog=f"imageshards {name}",
            description=textwrap.fill(f"{verb.summary} {verb.details}", _WIDTH),
            epilog=f"example:\n  imageshards {name} {verb.example}\n\nexit codes: {verb.exit_codes}, 2 bad usage",
        )
        for_each = "Print a JSON object for each photo, a line each."
        made.add_argument(
            "--json", action="store_true", help=for_each if name == "predict" else "Print one JSON object."
        )
        for parameter in (
            inspect.signature(verb.function).parameters | inspect.signature(verb.run).parameters
        ).values():
            self._add_flag(made, name, parameter)
        for option in dataclasses.fields(TrainOptions) if name == "train" else ():
            text, metavar = option.metadata["help"] % {"default": option.default}, option.metadata["metavar"]
            how: dict[str, Any] = {"metavar": metavar} if metavar else {"action": "store_true"}
            made.add_argument(f"--{option.name}", help=text.replace("%", "%%"), default=argparse.SUPPRESS, **how)
        return made

    def _add_flag(self, made: Parser, verb: str, parameter: inspect.Parameter) -> None:
        """Add the flag of a function's parameter: its type is the parameter's first one."""
        own, default = f"{verb}.{parameter.name}", parameter.default
        metavar, text = self._help.get(own) or self._help.get(parameter.name) or ("", "")
        if not text:
            return
        if not any(default is one for one in (parameter.empty, None, False)):
            text = f"{text[:-1]} (default: {default})."
        how: dict[str, Any] = {"help": text.replace("%", "%%")}
        if default is False:
            made.add_argument(f"--{parameter.name}", action="store_true", **how)
            return
        types: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "Classes": parse_classes}
        how |= {"metavar": metavar, "type": types.get(parameter.annotation.partition(" ")[0], str)}
        for key in {own, parameter.name} & self._positional.keys():
            made.add_argument(parameter.name, nargs=self._positional.get(own, self._positional[key]), **how)
            return
        is_required = default is parameter.empty
        made.add_argument(f"--{parameter.name}", required=is_required, default=None if is_required else default, **how)

    def _overview(self) -> Parser:
        verbs = {"write": "Convert images in class folders into TFRecord shards of equal size."}
        verbs |= {name: verb.summary for name, verb in self._verbs.items()}
        made = Parser(
            prog="imageshards",
            usage="imageshards [-h] [--version] COMMAND ...",
            description="Write, check, read and train on datasets of images in TFRecord shards.",
            epilog="\n".join(["commands:", *(f"  {name:10}  {text}" for name, text in verbs.items())])
            + "\n\nEach command has its own --help.",
        )
        made.add_argument("--version", action="store_true", help="Show the version, and what resizes images.")
        return made

    def run(self, given: Sequence[str]) -> int:
        """Run a command other than `write`; returns the exit code.

        Raises:
            UsageError: bad usage, or a package that isn't installed.
            ImageShardsError: the command failed.
        """
        if not given:
            self._overview().print_help(sys.stderr)
            return EXIT_USAGE
        name, *arguments = given
        if name == "--version":
            return _show_version()
        if name in ("-h", "--help"):
            self._overview().print_help()
            return EXIT_OK
        if name not in self._verbs:
            names = ["write", *self._verbs]
            raise _unknown("command", name, names, f"choose one of {', '.join(names)}")
        try:
            return self._run(self._verbs[name], arguments)
        except ModuleNotFoundError as error:
            hint = with_install_hint(error)
            if hint is error:
                raise
            raise UsageError(hint) from None

    def _run(self, verb: _Verb, arguments: Sequence[str]) -> int:
        made, function = self.parser(verb.name), verb.function
        values, rest = made.parse_known_args(list(map(_with_underscores, arguments)))
        if rest:
            name, flags = rest[0].partition("=")[0], re.findall(r"--\w+", made.format_usage())
            if verb.name == "info" and not name.startswith("-"):
                raise UsageError(f"info takes one dataset; to compare two: imageshards diff {values.dataset} {rest[0]}")
            raise _unknown("flag" if name.startswith("-") else "argument", name, flags, "see --help")
        own = dict(vars(values))
        called = {name: own.pop(name) for name in inspect.signature(function).parameters if name in own}
        command = shlex.join(["imageshards", verb.name, *arguments])
        try:
            return verb.run(Given(command, own.pop("json"), function, called), **own)
        except CorruptRecordError as error:
            if "dataset" not in values:  # `index`, which reads no dataset yet
                raise
            raise ImageShardsError(f"{error}; imageshards verify {values.dataset} finds every fault") from None


def _show_version() -> int:
    print(f"imageshards {__version__}")
    with suppress(ImportError):  # without Pillow nothing resizes
        from beam_pipeline.images.resize import described

        print(f"resize: {described()}")
    return EXIT_OK


def _with_underscores(argument: str) -> str:
    """`--image_size=3` for `--image-size=3`."""
    name, equals, value = argument.partition("=")
    return f"--{name[2:].replace('-', '_')}{equals}{value}" if name.startswith("--") else argument


def _unknown(what: str, given: str, known: Sequence[str], otherwise: str) -> UsageError:
    return UsageError(f"unknown {what} {given!r}: {meant(given, known, otherwise, str)}")
