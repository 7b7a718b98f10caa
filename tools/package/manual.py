# SPDX-License-Identifier: Apache-2.0
"""Manual pages and the shell's completion, of what the programs say of themselves.

usage: manual.py VERSION FOLDER PROGRAM...

Writes a page for each program into FOLDER, from its `--help` and that of its commands: forebay.1.gz, and for a service
NAME.8.gz. With forebay's page comes forebay.bash.
"""

from __future__ import annotations

import dataclasses
import gzip
import re
import subprocess
import sys
from pathlib import Path

# Section, and what the page names under FILES.
PAGES = {
    "forebay": (1, "/etc/forebay/forebay.toml, /run/forebay/forebay.sock"),
    "forebayd": (8, "/etc/forebay/forebay.toml, /run/forebay/forebay.sock"),
    "forebay-gateway": (8, "/etc/forebay/gateway.toml"),
}
ITEM = re.compile(r"^  (\S.*?)(?:\s{2,}(\S.*))?$")
CONTINUED = re.compile(r"^\s{8,}(\S.*)$")


@dataclasses.dataclass
class Section:
    """A list of a help text: its title, and pairs of a term and what it means."""

    title: str
    items: list[tuple[str, str]]


@dataclasses.dataclass
class Help:
    """What a program or a command says of itself."""

    summary: str
    usage: str
    sections: list[Section]

    def section(self, title: str) -> list[tuple[str, str]]:
        """The items of one section; empty if the help has no such section."""
        return next((one.items for one in self.sections if one.title == title), [])

    def options(self) -> list[str]:
        """Every option as it is typed, `--dram`."""
        words = [re.split(r"[ ,]", term)[:2] for term, _ in self.section("Options")]
        return sorted({word for pair in words for word in pair if word.startswith("-")})


def parse(text: str) -> Help:
    """Of CLI11's help text.

    >>> parse("Does it\\nUsage: it [OPTIONS]\\n\\nOptions:\\n  -h,--help          shows this\\n").options()
    ['--help', '-h']
    """
    lines = text.rstrip().split("\n")
    usage = next(number for number, line in enumerate(lines) if line.startswith("Usage: "))
    parsed = Help(" ".join(lines[:usage]).strip(), lines[usage].removeprefix("Usage: "), [])
    for line in lines[usage + 1 :]:
        if not line:
            continue
        if not line.startswith(" "):
            parsed.sections.append(Section(line.rstrip(":"), []))
            continue
        items = parsed.sections[-1].items
        if found := CONTINUED.match(line):
            term, said = items[-1]
            items[-1] = (term, f"{said} {found[1]}".strip())
        elif found := ITEM.match(line):
            items.append((found[1].replace("{false}", ""), found[2] or ""))
        else:
            raise ValueError(f"no line of a help text: {line!r}")
    return parsed


def help_of(program: str, *command: str) -> Help:
    done = subprocess.run([program, *command, "--help"], capture_output=True, text=True, check=True)
    return parse(done.stdout)


def escape(text: str) -> str:
    """As roff prints it literally."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return "\\&" + text if text.startswith((".", "'")) else text


def list_of(items: list[tuple[str, str]]) -> list[str]:
    lines = []
    for term, meaning in items:
        lines += [".TP", f".B {escape(term)}", escape(meaning)]
    return lines


def sentence(summary: str) -> str:
    """"Serves jobs" -> "serves jobs", as the NAME section has it."""
    return summary[:1].lower() + summary[1:]


def page(name: str, version: str, about: Help, commands: dict[str, Help]) -> str:
    """A whole manual page."""
    section, files = PAGES[name]
    lines = [
        f'.TH {name.upper()} {section} "" "Forebay {version}" "Forebay"',
        ".SH NAME",
        f"{name} \\- {escape(sentence(about.summary.removeprefix('Forebay: ')))}",
        ".SH SYNOPSIS",
        f".B {escape(about.usage)}",
    ]
    for one in about.sections:
        if one.title != "Subcommands":
            lines += [f".SH {escape(one.title.upper())}", *list_of(one.items)]
    if commands:
        lines.append(".SH COMMANDS")
    for command, described in commands.items():
        lines += [f".SS {escape(command)}", escape(described.summary), ".PP", f".B {escape(described.usage)}"]
        for one in described.sections:
            items = [item for item in one.items if not item[0].startswith("-h,")]
            lines += list_of(items)
    others = ", ".join(f"{other} ({number})" for other, (number, _) in PAGES.items() if other != name)
    lines += [".SH FILES", files, ".SH SEE ALSO", f".BR {escape(others)}"]
    return "\n".join(lines) + "\n"


def completion(about: Help, commands: dict[str, Help]) -> str:
    """For bash: commands, their options, and file names everywhere else."""
    cases = "\n".join(
        f"    {command}) words='{' '.join(described.options())}' ;;" for command, described in commands.items()
    )
    top = " ".join([*commands, *about.options()])
    bench = dict(commands["bench"].section("Positionals")).get("WHAT TEXT REQUIRED", "")
    names = bench.removeprefix("one of: ").partition(";")[0].replace(",", "")
    return f"""# bash completion of forebay, made from its --help
_forebay() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} command=${{COMP_WORDS[1]:-}} at words
  COMPREPLY=()
  for ((at = 2; at < COMP_CWORD; ++at)); do
    if [[ $command =~ ^(run|launch)$ && ${{COMP_WORDS[at]}} == -- ]]; then
      _command_offset $((at + 1)) 2>/dev/null
      return
    fi
  done
  if ((COMP_CWORD == 1)); then
    mapfile -t COMPREPLY < <(compgen -W '{top}' -- "$word")
    return
  fi
  case $command in
{cases}
    *) return ;;
  esac
  if [[ $word == -* ]]; then
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$word")
  elif [[ $command == bench ]]; then
    mapfile -t COMPREPLY < <(compgen -W '{names}' -- "$word")
  fi
}}
complete -o default -F _forebay forebay
"""


def main(arguments: list[str]) -> int:
    if len(arguments) < 4:
        print(__doc__, file=sys.stderr)
        return 2
    version, folder = arguments[1], Path(arguments[2])
    folder.mkdir(parents=True, exist_ok=True)
    for program in arguments[3:]:
        name = Path(program).name
        about = help_of(program)
        commands = {command: help_of(program, command) for command, _ in about.section("Subcommands")}
        text = page(name, version, about, commands)
        (folder / f"{name}.{PAGES[name][0]}.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
        if name == "forebay":
            (folder / "forebay.bash").write_text(completion(about, commands), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
