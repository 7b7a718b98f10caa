# SPDX-License-Identifier: Apache-2.0
"""Counts the public methods and the members of each class of C++, for house.py.

A struct is a value: its members are its purpose, so that only its methods count. Constructors, destructors, operators, types and
friends are not counted, and overloads count once.
"""

import re

METHODS_MAX = 25
MEMBERS_MAX = 20

# Classes above a limit, each with the reason why it is one class.
EXCEPTED = {
    "Attachment": "the client's interface: each method is a call that a training loop makes",
    "BlockLedger": "the versions of a block change together: each method is one change of them, or a view",
    "GatewaySession": "the queues of one session, whose order is the protocol between rank and daemon",
    "Membership": "the table of a job's sessions by rank, generation and state: each method is one change or one question",
    "NodeState::Impl": "handles each event of events.h by a method of its own, and admits jobs",
    "SwapSpace": "the volume, its staging slots and its transfers share one event loop and one order of completions",
    "Volume::State": "the private state of Volume, which its source files share",
}

OPENED = re.compile(r"\b(class|struct)\s+(?:\[\[\w+\]\]\s+)?([\w:]+)(?:\s+final)?\s*(?::[^;{(]*)?\{")
UNCOUNTED = re.compile(r"(friend|using|typedef|static_assert|enum|class|struct|template <[^>]*> (class|struct))\b")
TEMPLATE = re.compile(r"(?<=\w)<[^<>]*>")
MEMBER = re.compile(r"[\w>\]&*]\s+(\w+_)\s*(=|\{|\[|$)")
METHOD = re.compile(r"(~?\w+|operator\s*[^\s(]+)\s*\(")


def statements_of(code, start):
    """(access, statement) of each declaration in the body that begins at `start`; access is None before the first label. The
    text of nested braces is left out."""
    access, statement, braces, brackets = None, "", 0, 0
    for at in range(start, len(code)):
        letter = code[at]
        if letter == "{":
            braces += 1
        elif letter == "}":
            braces -= 1
            if braces < 0:
                return
            if braces == 0 and brackets == 0 and not code[at + 1 : at + 40].lstrip().startswith((";", ",", ")")):
                yield access, statement
                statement = ""
        elif braces == 0:
            brackets += (letter == "(") - (letter == ")")
            if letter == ";" and brackets == 0:
                yield access, statement
                statement = ""
            elif letter == ":" and re.fullmatch(r"\s*(public|private|protected)\s*", statement):
                access, statement = statement.strip(), ""
            else:
                statement += letter


def classes_of(code):
    """(line, name, methods, members) of each class of a file whose comments and strings are blank."""
    for opened in OPENED.finditer(code):
        is_struct, name = opened[1] == "struct", opened[2]
        methods, members = set(), 0
        for access, statement in statements_of(code, opened.end()):
            text = re.sub(r"\[\[\w+\]\]|\b[A-Z]+_[A-Z_]+\([^()]*\)", "", statement)
            while "<" in text and TEMPLATE.search(text):  # the innermost arguments first
                text = TEMPLATE.sub("", text)
            text = " ".join(text.split())
            if not text or UNCOUNTED.match(text):
                continue
            member = MEMBER.search(text)
            if member and "(" not in text[: member.start(1)]:
                members += not is_struct
            elif (access or ("public" if is_struct else "private")) == "public":
                method = METHOD.search(text)
                is_special = method and (method[1].lstrip("~") == name.split("::")[-1] or "operator" in method[1])
                if method and not is_special:
                    methods.add(method[1])
        yield code.count("\n", 0, opened.start()) + 1, name, len(methods), members


def large_classes(code):
    """(line, name, text) of each class above a limit."""
    for line, name, methods, members in classes_of(code):
        if methods > METHODS_MAX or members > MEMBERS_MAX:
            yield line, name, f"{name} has {methods} public methods and {members} members"
