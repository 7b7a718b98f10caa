#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The house rules a compiler cannot check: who may include whom, what is listed, how large, which
words.

usage: house.py ROOT

Prints one line a breach, `path:line: [rule] what, and what to do`, and exits 1 if there is any.
A line whose comment, or the line above it, says `house: allow RULE: reason` may break that rule;
for `size` the first ten lines may say so.
"""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path, PurePosixPath

import house_classes

ROOMS = ("protocol", "pinned_mem", "nvme", "cpu_adam", "gpu", "daemon", "client", "tools", "tests")
DOWN = {  # rooms that each room may include in addition to itself
    "protocol": set(),
    "pinned_mem": {"protocol"},
    "nvme": {"protocol"},
    "cpu_adam": {"protocol"},
    "gpu": {"protocol"},
    "daemon": {"protocol", "pinned_mem", "nvme", "cpu_adam"},
    "client": {"protocol", "gpu"},
    "tools": {"protocol", "client"},
    "tests": set(ROOMS),
}
LIBRARIES = {  # start of an include path: (library, rooms that may name it)
    "absl/": ("Abseil", set(ROOMS)),
    "capnp/": ("Cap'n Proto", {"protocol", "daemon", "client", "tools", "tests"}),
    "kj/": ("Cap'n Proto", {"protocol", "daemon", "client", "tools", "tests"}),
    "gtest/": ("GoogleTest", {"tests"}),
    "gmock/": ("GoogleTest", {"tests"}),
    "hwloc": ("hwloc", {"pinned_mem", "cpu_adam", "tests"}),
    "liburing": ("liburing", {"nvme", "tests"}),
    "xxhash": ("xxHash", {"nvme", "cpu_adam", "tests"}),
    "xxh3": ("xxHash", {"nvme", "cpu_adam", "tests"}),
    "hwy/": ("Highway", {"cpu_adam", "tests"}),
    "spdlog/": ("spdlog", {"daemon", "tests"}),
    "toml++/": ("toml++", {"daemon", "tests"}),
    "prometheus/": ("prometheus-cpp", {"daemon", "tests"}),
    "CLI/": ("CLI11", {"daemon", "tools", "tests"}),
    "nlohmann/": ("nlohmann-json", {"tools", "tests"}),
    "cuda": ("CUDA", {"gpu"}),
    "nccl": ("NCCL", {"gpu"}),
    "ucp/": ("UCX", {"protocol"}),
    "ucs/": ("UCX", {"protocol"}),
    "nanobind/": ("nanobind", {"client"}),
}
TOP_FOLDERS = set(ROOMS) | {"docs"}
FLOORS = {  # folders of a room: the folders of the same room that each may include
    "daemon/core": {"daemon/core"},
    "daemon/exec": {"daemon/core", "daemon/exec"},
    "daemon/control": {"daemon/core", "daemon/exec", "daemon/control"},
    "nvme/io": {"nvme/io"},
    "protocol/os": {"protocol/os"},
}
# Folders of daemon/core/, the ground floor first: each may include itself and those before it.
CORE_FOLDERS = ("base", "blocks", "plan", "sessions", "update", "step", "job", "node")
LINES_MAX = 800  # lines of a file without the licence line
LICENCE = "SPDX-License-Identifier: Apache-2.0"
COLUMNS = 100
CPP = {".cc", ".h", ".c", ".cu", ".inc"}
SIZED = CPP | {".py", ".sh", ".cmake", ".capnp", ".txt"}
WORDED = SIZED | {".md", ".html", ".service", ".json", ""}

BANNED = [  # pattern, replacement
    (r"\bbuckets?\b", "group"),
    (r"\b(TODO|FIXME|XXX)\b", "do it now, or open an issue"),
    (r"\bwhite-?lists?\b", "allow list"),
    (r"\bblack-?lists?\b", "deny list"),
    (r"\bslaves?\b", "worker"),
    (r"\butili[sz]e[sd]?\b", "use"),
    (r"\bleverag(e[sd]?|ing)\b", "use"),
]
COINAGES = [  # names that this tree once used; any case, also within compound identifiers
    (r"(?<!linux-)(?<!rom)image", "weights"),  # except a kernel's or a ROM's image
    (r"wish", "request"),
    (r"(?<!s)crew", "pool"),
    (r"\bteams?\b", "pool"),
    (r"outbox", "ActionSink"),
    (r"(gradient|arena)_?book", "accumulator or registry"),
    (r"\b(a|the|this|our) book\b", "accumulator or registry"),
    (r"\bpictures?\b", "snapshot"),
    (r"spoil", "invalidate"),
    (r"doom", "delete"),
    (r"greeted", "handshake_done, connected"),
    (r"\bfor ever\b", "permanently"),
    (r"\bmend(s|ed|ing)?\b", "fix"),
    (r"\bset-up\b", "setup"),
    (r"(?<!c)(lose|leave)_?rank", "OnRankFailed, OnRankDetached"),
    (r"\bfirst_?blocker\b|\bblocker_?of\b", "FirstMissingRank"),
    (r"timeouterror_", "ForebayTimeoutError"),
    (r"\bvot(e|es|ed|ing)\b", "step request, step call"),
    (r"verdict", "decision, result"),
    (r"settl(e|ing)", "reducing"),
    (r"\bstr(ike|ikes|iking|uck)\b", "unregister"),
    (r"\breliev(e|es|ed|ing)\b", "SpillToOverflow"),
    (r"\bdonat(e|es|ed|ing)\b", "reclaim"),
    (r"\bunwanted\b", "cancelled"),
    (r"\bdraws?\b", "random number, stochastic rounding"),
    (r"bypass", "non-temporal"),
    (r"\bprocessors\b", "CPUs"),
    (r"told", "reported"),
]
BANNED_CPP = [
    (r"\babsl::Mutex\b", "protocol::Mutex"),
    (r"\bstd::(recursive_)?mutex\b", "protocol::Mutex"),
    (r"\babsl::(Span|optional|variant|any|string_view|make_unique)\b", "its twin in std"),
    (r"\butils?\b", "a name that says what it does"),
    (r"\bNULL\b", "nullptr"),
    (r"\btypedef\b", "using"),
    (r"\busing namespace std\b", "the names one by one"),
    (r"(?<!::)\bTake[A-Z]\w*(?=\()", "Handle, Allocate, Drain or ValueOrThrow"),
]


def literal_of(pattern):
    """The longest text that whatever matches has; "" if that is not easily seen."""
    bare = re.sub(r"\([^()]*\)[?*]?", "\0", pattern)  # groups, look-arounds
    if "|" in bare or "(" in bare:
        return ""
    bare = re.sub(r"\\[bwSs][+*]?|\[[^]]*\][+*?]?|.\?", "\0", bare)
    return max(re.split(r"[^A-Za-z_: -]", bare), key=len)


# Each pattern with its longest literal text. Most files contain none of the words, and a search for the literal is about ten
# times as fast as a search for the pattern.
BANNED = [(literal_of(pattern), re.compile(pattern), replacement) for pattern, replacement in BANNED]
COINAGES = [(literal_of(pattern).lower(), re.compile(pattern, re.I), replacement) for pattern, replacement in COINAGES]
BANNED_CPP = [(literal_of(pattern), re.compile(pattern), replacement) for pattern, replacement in BANNED_CPP]


class Source:
    """One file: its lines, and for C++ the lines again without comments and without the text of strings."""

    def __init__(self, path, text):
        self.path = path
        self.room = path.split("/")[0]
        self.suffix = PurePosixPath(path).suffix
        self.text = text
        self.lines = text.splitlines()
        self.cpp = self.suffix in CPP
        self.code = strip_cpp(text).splitlines() if self.cpp else self.lines

    def allows(self, rule, line):
        near = self.lines[:10] if rule == "size" else self.lines[max(line - 2, 0) : line]
        return any(re.search(rf"house: allow {re.escape(rule)}: \S", text) for text in near)


TOKEN = re.compile(  # a string, a character or a comment of C++
    r'R"(?P<tag>[^(\s]*)\(.*?\)(?P=tag)"|"(\\.|[^"\\\n])*"|(?<![0-9a-fA-F])\'(\\.|[^\'\\\n])+\''
    r"|//[^\n]*|/\*.*?\*/",
    re.S,
)


def strip_cpp(text):
    """Blanks comments, strings and characters; the number of lines stays."""
    return TOKEN.sub(lambda match: '""' + "\n" * match.group().count("\n"), text)


def tracked_files(root):
    if (root / ".git").exists():
        listed = subprocess.run(
            [
                "git",
                "-c",
                "safe.directory=*",
                "-C",
                str(root),
                "ls-files",
                "-co",
                "--exclude-standard",
                "-z",
            ],
            check=True,
            capture_output=True,
        ).stdout.decode()
        return sorted(name for name in listed.split("\0") if name and (root / name).is_file())
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in ("build", ".venv", "__pycache__")]
        found += [(Path(folder) / name).relative_to(root).as_posix() for name in files]
    return sorted(found)


def read_sources(root):
    for path in tracked_files(root):
        if PurePosixPath(path).suffix not in WORDED:
            continue
        try:
            yield Source(path, (root / path).read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue  # the file is binary


def includes(source):
    for number, line in enumerate(source.lines, 1):
        match = re.match(r'\s*#\s*include\s*([<"])([^>"]+)[>"]', line)
        if match:
            yield number, match.group(2)


def looks_into_every_room(path):
    return re.match(r"tools/forebay/(bench|doctor)", path) is not None


def core_folder(path):
    """The folder of daemon/core/ that a path lies in; "" if it lies in none; None outside daemon/core/."""
    if not path.startswith("daemon/core/"):
        return None
    parts = path.split("/")
    return parts[2] if len(parts) > 3 else ""


def check_core(source):
    """The floors of daemon/core/."""
    folder = core_folder(source.path)
    if folder is None or not source.cpp:
        return
    if folder not in CORE_FOLDERS:
        yield 1, "floor", f"daemon/core/ has the folders {', '.join(CORE_FOLDERS)}: move the file into one"
        return
    below = CORE_FOLDERS[: CORE_FOLDERS.index(folder) + 1]
    for number, target in includes(source):
        other = core_folder(target)
        if other is not None and other not in below:
            yield number, "floor", f"daemon/core/{folder}/ may not include {target}: includes go down only"


def check_include(source):
    if source.room not in ROOMS or not source.cpp:
        return
    floor = "/".join(source.path.split("/")[:2])
    for number, target in includes(source):
        room = target.split("/")[0] if "/" in target else ""
        if floor in FLOORS and room == source.room:
            if "/".join(target.split("/")[:2]) not in FLOORS[floor]:
                yield number, "floor", f"{floor}/ may not include {target}: includes go down only"
        if room in ROOMS:
            reachable = DOWN[source.room] | {source.room}
            if looks_into_every_room(source.path):
                reachable = set(ROOMS) - {"tests"}
            if room not in reachable:
                yield number, "include", f"{source.room}/ may not include {room}/: includes go down only"
            elif "/internal/" in target and room != source.room and source.room != "tests":
                yield number, "internal", f"{target} is for {room}/ and its tests"
        if target.endswith(".capnp.h"):
            target = "capnp/" + target
        for start, (library, rooms) in LIBRARIES.items():
            if (
                target.startswith(start)
                and source.room not in rooms
                and not looks_into_every_room(source.path)
            ):
                yield number, "library", f"{source.room}/ may not name {library}"


def check_test_file(source):
    if source.room != "tests" or not source.path.endswith("_test.cc"):
        return
    if not re.match(rf"(// {LICENCE}\n)?// Goal\b", source.text) or not re.search(r"^// Method\b", source.text, re.M):
        yield 1, "goal", "a test file opens with Goal and Method"


def check_cpp(source):
    if not source.cpp:
        return
    for number, line in enumerate(source.code, 1):
        before = source.code[number - 2] if number > 1 else ""
        if re.search(r"\bgoto\b", line):
            yield number, "goto", "no goto: return, or a function of its own"
        owned = re.search(r"(unique_ptr|shared_ptr)\b.*|WrapUnique", before + line)
        if re.search(r"(?<!operator )\bnew\b", line) and not owned and not re.match(r"\s*#", line):
            yield number, "ownership", "no new: std::make_unique, or an owner on the same line"
        if re.search(r"(?<!operator )(?<!= )(?<!=)\bdelete\b", line):
            yield number, "ownership", "no delete: an owner's destructor does it"
        if re.search(r"\b(secure_)?getenv\b", line) and source.room != "tests":
            if (
                PurePosixPath(source.path).name != "main.cc"
                and source.path != "client/environment.cc"
            ):
                yield number, "getenv", "getenv only in main.cc and client/environment.cc: pass options"
    if source.path != "protocol/os/mutex.h":
        yield from words_of(BANNED_CPP, "word", "\n".join(source.code))
    if source.suffix == ".h" and "#pragma once" not in source.lines:
        yield 1, "pragma", "a header says #pragma once"


def check_torn(source):
    """A declaration that the formatter broke because of a comment behind it."""
    if not source.cpp:
        return
    for number, (line, after) in enumerate(zip(source.lines, source.lines[1:]), 1):
        match = re.match(r"^\s*([^\"/]+?[;,)])\s+//", after)
        whole = not line or re.search(r"[;{}:,]$|//", line) or re.match(r"\s*(#|template\b)", line)
        if not match or whole:
            continue
        if len(line) + 1 + len(match.group(1)) <= COLUMNS:
            yield number, "torn", "the comment stands above its declaration, not behind it"


def check_tests(source):
    if source.room != "tests":
        return
    for number, line in enumerate(source.code, 1):
        if re.search(
            r"\b(sleep_for|sleep_until|usleep|nanosleep)\s*\(|(::|time\.)sleep\s*\(", line
        ):
            yield number, "sleep", "no sleep in a test: wait for the event, with a deadline"
        if re.search(r"\bGTEST_SKIP\s*\(\s*\)\s*;", line) or re.search(
            r"\bpytest\.(skip\(\s*\)|mark\.skip\b(?!\())", line
        ):
            yield number, "skip", "a skip prints its reason"
    for number, line in enumerate(source.lines, 1):
        if source.cpp and re.search(r"\bDISABLED_", line):
            if not any("issue" in text for text in source.lines[max(number - 3, 0) : number]):
                yield number, "disabled", "a disabled test names its issue"


def words_of(table, rule, text):
    """Each line of the text with a word of the table, once a word."""
    lower = text.lower()
    for literal, pattern, replacement in table:
        if literal.lower() not in lower:
            continue
        for number, line in enumerate(text.split("\n"), 1):
            match = pattern.search(line)
            if match:
                yield number, rule, f"'{match.group()}': write {replacement}"


SUPPRESSIONS = re.compile(r"no_sanitize|default_suppressions|sanitize-(ignorelist|blacklist)|\bsuppressions=")


def check_text(source):
    yield from words_of(BANNED, "word", source.text)
    yield from words_of(COINAGES, "coinage", source.text)
    for match in SUPPRESSIONS.finditer(source.text):
        number = source.text.count("\n", 0, match.start()) + 1
        yield number, "suppression", "no suppression: fix what the tool found"
    count = len(source.lines) - any(LICENCE in line for line in source.lines[:2])
    if source.suffix in SIZED and count > LINES_MAX:
        yield len(source.lines), "size", f"{count} lines: {LINES_MAX} is the end"


OPENING = re.compile(r"(?:(?:Goal|Method) +)?((?:Of|What|Where|Whose|Those|Else|As)\b)")
OPENED_LINE = re.compile(r"//[/ ]*" + OPENING.pattern)  # also within a string, or in a comment's later line
GENERATED = {"docs/reference/troubleshooting.md"}  # generated from texts of the program


def comments_of(source):
    """(line, text) of each comment; of neighbouring lines that hold nothing else the first. Empty for a file of C++ without
    an OPENED_LINE, because tokens take long."""
    if source.cpp:
        for match in TOKEN.finditer(source.text) if OPENED_LINE.search(source.text) else ():
            if match.group().startswith("//"):
                number = source.text.count("\n", 0, match.start()) + 1
                before = source.lines[number - 2].lstrip() if number > 1 else ""
                if not (source.lines[number - 1].lstrip().startswith("//") and before.startswith("//")):
                    yield number, match.group().lstrip("/ ")
        return
    before = ""
    for number, line in enumerate(source.lines, 1):
        match = re.match(r"(?P<whole>\s*#)[# ]+(\S.*)|\S.*?\s{2}# (\S.*)", line)
        if match and not (match["whole"] and before.lstrip().startswith("#")):
            yield number, match[2] or match[3]
        before = line


def paragraphs_of(source):
    """(line, text) of each paragraph and list item of a page."""
    fence, before = False, ""
    for number, line in enumerate(source.lines, 1):
        fence ^= line.lstrip().startswith("```")
        item = re.match(r"\s*(?:[-*]|\d+\.) +(\S.*)", line)
        if not fence and (item or (not before and re.match(r"[A-Z]", line))):
            yield number, item[1] if item else line
        before = line.strip()


def check_opening(source):
    """A comment, and a paragraph of the docs, begins with the thing that it is about, or with a verb."""
    if source.path in GENERATED:
        return
    is_page = source.suffix == ".md"
    for number, text in (paragraphs_of if is_page else comments_of)(source):
        match = OPENING.match(text)
        if match:
            yield number, "opening", f"'{match[1]}' begins it: begin with the thing, or with a verb"


def check_kernels(sources):
    """What is compiled once per instruction set, contracts and all: (path, line, rule, text)."""
    room = {source.path: source for source in sources if source.room == "cpu_adam" and source.cpp}
    compiled = [
        path
        for path, source in room.items()
        if any(target in ("hwy/highway.h", "hwy/foreach_target.h") for _, target in includes(source))
    ]
    seen = set()
    while compiled:
        path = compiled.pop()
        if path in seen:
            continue
        seen.add(path)
        for number, target in includes(room[path]):
            if target in room:
                compiled.append(target)
            elif (
                target.startswith(("protocol/", "absl/")) and target != "protocol/optimizer_ids.h"
            ):
                text = "kernels and their contracts include Highway and protocol/optimizer_ids.h alone"
                yield path, number, "kernel", text


PACKAGE = "client/python/forebay/"
PACKAGE_FLOORS = (  # modules and folders of the Python package; each imports its own floor and those before it
    ("_core", "errors", "optimizers", "_memory", "_report"),  # the extension and the words
    ("_launcher", "_run", "_world", "_device", "_metrics"),  # this process, its launch, device and daemon
    ("_checks", "options"),  # the options of attach
    ("_plan", "_buffers", "_gradient", "_guards", "_activations"),  # one model
    ("_base", "_engine", "_hooks"),  # the training of an attached model
    ("sharded",),  # the training of a model on FSDP2
    ("states",),  # the optimizer's states in torch's format, in files and for readers
    ("_writes", "_optimizer", "_adopt", "_attach"),
    ("api", "_progress", "__init__"),
    ("integrations",),
)


def package_imports(source, modules):
    """Yields (line, module) of each import from the package itself: late ones and those for type checks too."""
    folder = PurePosixPath(source.path[len(PACKAGE) :]).parts[:-1]
    for node in ast.walk(ast.parse(source.text, source.path)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            names = [name[1:] for name in names if name[0] == "forebay"]
        elif isinstance(node, ast.ImportFrom):
            start = (node.module or "").split(".") if node.module else []
            if node.level:
                start = [*folder[: len(folder) - node.level + 1], *start]
            elif start[:1] == ["forebay"]:
                start = start[1:]
            else:
                continue
            names = [[*start, alias.name] for alias in node.names]
        for name in names:
            while name and "/".join(name) not in modules:
                name = name[:-1]
            yield node.lineno, "/".join(name) or "__init__"


def check_package(sources):
    """The Python package: imports go down only, and nothing imports itself through others."""
    floor_of = {name: floor for floor, names in enumerate(PACKAGE_FLOORS) for name in names}
    own = {}
    for source in sources:
        if source.path.startswith(PACKAGE) and source.suffix == ".py":
            own[re.sub(r"(?<=.)/__init__$", "", source.path[len(PACKAGE) : -len(".py")])] = source
    imported = {}
    for module, source in own.items():
        floor = floor_of.get(module.split("/")[0])
        if floor is None:
            yield source.path, 1, "import", f"{module} is on no floor: list it in PACKAGE_FLOORS"
            floor = len(PACKAGE_FLOORS)
        imported[module] = {}
        for number, target in package_imports(source, {*own, *floor_of}):
            imported[module].setdefault(target, number)
            if floor_of.get(target.split("/")[0], floor) > floor:
                yield source.path, number, "import", f"{module} may not import {target}: imports go down only"
    seen = set()
    for module in sorted(imported):
        circle = circle_through(module, imported)
        if circle and not seen & set(circle):
            seen |= set(circle)
            text = f"circle of imports {' -> '.join(circle)}: move what they share into a module below them"
            yield own[module].path, imported[module][circle[1]], "circle", text


def circle_through(module, imported):
    """The shortest way along imports from a module back to it, both ends included; None if there is none."""
    ways = [[module]]
    seen = set()
    for way in ways:
        for target in sorted(imported.get(way[-1], ())):
            if target == module:
                return [*way, module]
            if target not in seen:
                seen.add(target)
                ways.append([*way, target])
    return None


def check_imports_of_tools(sources):
    """Scripts of tools/ may start a program of tests/ and import nothing from there: (path, line, rule, text)."""
    modules = {
        room: {PurePosixPath(source.path).stem for source in sources if source.room == room and source.suffix == ".py"}
        for room in ("tests", "tools")
    }
    of_tests = (modules["tests"] - modules["tools"]) | {"tests"}
    for source in sources:
        if source.room != "tools":
            continue
        for number, line in enumerate(source.lines, 1):
            if source.suffix == ".py":
                imported = re.match(r"\s*(?:import|from)\s+(\w+)", line)
                breaks = (imported and imported.group(1) in of_tests) or re.search(r"sys\.path\b.*\btests\b", line)
            else:
                breaks = source.suffix in ("", ".sh") and re.match(r"\s*(source|\.)\s+\S*\btests/", line)
            if breaks:
                yield source.path, number, "import", "tools/ imports nothing from tests/: start a program there"


def check_classes(root, sources):
    """A class has few public methods and members, or a reason in house_classes.py."""
    large = set()
    for source in sources:
        if not source.cpp or source.room == "tests":
            continue
        for number, name, text in house_classes.large_classes("\n".join(source.code)):
            large.add(name)
            if name not in house_classes.EXCEPTED:
                limits = f"at most {house_classes.METHODS_MAX} and {house_classes.MEMBERS_MAX}"
                yield source.path, number, "class", f"{text} ({limits}): split it by responsibility"
    listed = "tests/tools/house_classes.py"
    if (root / listed).exists():  # the list is of this tree
        for name in sorted(house_classes.EXCEPTED.keys() - large):
            yield listed, 1, "class", f"{name} is below the limits: take it off the list"


def check_licence(root, sources):
    """Each file with code names the licence in its first line, a script in its second; docs/examples/ is for copying."""
    if not (root / "LICENSE").exists():
        return
    for source in sources:
        is_script = source.suffix in (".py", ".sh") or source.text.startswith("#!")
        is_code = source.cpp or is_script or source.suffix == ".capnp" or source.path.endswith("CMakeLists.txt")
        if is_code and source.room in ROOMS and not any(LICENCE in line for line in source.lines[:2]):
            yield source.path, 1, "licence", f"the first line is `{LICENCE}`, as a comment"


def check_tree(root, sources):
    """Rules about files rather than lines: (path, line, rule, text)."""
    yield from check_licence(root, sources)
    yield from check_classes(root, sources)
    yield from check_kernels(sources)
    yield from check_package(sources)
    yield from check_imports_of_tools(sources)
    listed = {}
    for source in sources:
        if source.path.startswith("tests/") and source.path.endswith("CMakeLists.txt"):
            listed[str(PurePosixPath(source.path).parent)] = source.text
    for source in sources:
        folder = PurePosixPath(source.path).parent
        name = PurePosixPath(source.path).name
        if source.path.startswith("tests/") and name.endswith("_test.cc"):
            # A CMakeLists.txt lists a test with its suffix, or without the suffix as a word of a foreach().
            below = {
                at: PurePosixPath(source.path).relative_to(at).with_suffix("").as_posix()
                for at in listed
                if folder.is_relative_to(at)
            }
            if not any(
                re.search(rf"(?<![\w/-]){re.escape(stem)}(\.cc)?(?![\w./-])", listed[at])
                for at, stem in below.items()
            ):
                yield source.path, 1, "unlisted", "no CMakeLists.txt lists this test"
    folders = set()
    for path in tracked_files(root):
        top = path.split("/")[0]
        if (
            "/" in path
            and top not in TOP_FOLDERS
            and not top.startswith(".")
            and top not in folders
        ):
            folders.add(top)
            yield top, 1, "folder", "no other folder at the top"
        if re.search(r"(^|/)[^/]*(\.supp|suppressions?[^/]*\.txt)$", path):
            yield path, 1, "suppression", "no suppression files: fix what the tool found"


CHECKS = (
    *(check_include, check_core, check_test_file, check_cpp),
    *(check_torn, check_tests, check_text, check_opening),
)


def breaches(root):
    # Files that state the rules contain the words that the rules forbid.
    own = {f"tests/tools/{name}.py" for name in ("house", "house_classes", "house_selftest")}
    sources = [source for source in read_sources(root) if source.path not in own]
    for source in sources:
        for check in CHECKS:
            for number, rule, text in check(source):
                if not source.allows(rule, number):
                    yield source.path, number, rule, text
    yield from check_tree(root, sources)


def main(arguments):
    if len(arguments) != 2:
        print("usage: house.py ROOT", file=sys.stderr)
        return 2
    found = sorted(breaches(Path(arguments[1])))
    for path, number, rule, text in found:
        print(f"{path}:{number}: [{rule}] {text}")
    print(f"house: {len(found)} breaches")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
