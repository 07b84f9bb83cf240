"""The command ``ncclx-rs completion``: what a shell needs to complete the others' names and options.

source <(ncclx-rs completion bash)
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Mapping

SHELLS = ("bash", "zsh", "fish")

# For each command its description, and for each of its options the meaning.
Words = Mapping[str, tuple[str, Mapping[str, str]]]


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    made = argparse.ArgumentParser(
        prog="ncclx-rs completion",
        description="Prints a script for a shell, which completes the commands and options of ncclx-rs.",
        epilog="bash: source <(ncclx-rs completion bash); fish: ncclx-rs completion fish | source",
    )
    made.add_argument("shell", choices=SHELLS, help="the shell")
    return made


def options_of(made: argparse.ArgumentParser) -> dict[str, str]:
    """The long options of a parser, with their meanings."""
    return {
        name: (action.help or "").split(";")[0]
        for action in made._actions
        for name in action.option_strings
        if name.startswith("--")
    }


def bash(words: Words) -> str:
    """The script for bash: commands first, then a command's options, else files."""
    cases = "\n".join(f'        {name}) words="{" ".join(options)}" ;;' for name, (_, options) in words.items())
    return f"""\
_ncclx_rs() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" words="{" ".join(words)} --help --version"
    if ((COMP_CWORD > 1)); then
        case "${{COMP_WORDS[1]}}" in
{cases}
        *) words="" ;;
        esac
        [[ $word == -* ]] || words=""
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _ncclx_rs ncclx-rs
"""


def zsh(words: Words) -> str:
    """The script for zsh, which runs that for bash."""
    return f"autoload -U +X compinit bashcompinit\n(( $+functions[compdef] )) || compinit\nbashcompinit\n{bash(words)}"


def fish(words: Words) -> str:
    """The script for fish, with descriptions."""

    def quoted(text: str) -> str:
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

    lines = []
    for name, (meaning, options) in words.items():
        lines.append(f"complete -c ncclx-rs -n __fish_use_subcommand -a {name} -d {quoted(meaning)}")
        within = f"complete -c ncclx-rs -n '__fish_seen_subcommand_from {name}'"
        lines += [f"{within} -l {option[2:]} -d {quoted(help)}" for option, help in options.items()]
    return "\n".join(lines) + "\n"


def script(shell: str, words: Words) -> str:
    """The script for a shell."""
    makers: dict[str, Callable[[Words], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
    return makers[shell](words)


def execute(options: argparse.Namespace, made: argparse.ArgumentParser) -> int:
    """Prints the script for the shell of these options; returns the exit code."""
    from ncclx_rs.__main__ import COMMANDS

    words = {
        name: (meaning, options_of(importlib.import_module(module).parser()))
        for name, (module, meaning) in COMMANDS.items()
    }
    sys.stdout.write(script(options.shell, words))
    return 0
