#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Goal    The house rules report each breach, at its line and under its rule, and nothing else.
Method  A small clean tree is written to a temporary folder: no breach. Then, rule by rule, one
        file with one breach is added, and exactly that breach must be reported. The same tree with
        all of them at once must report all of them; a reason beside the breach silences it.
"""

import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import house  # noqa: E402

TEST_HEAD = "// Goal    Something holds.\n// Method  It is tried.\n\n"

METHOD = "  int F{0}(std::function<int(int)> f) const {{ return f({{1}}); }}\n"
METHODS_25 = "".join(METHOD.format(number % 25) for number in range(50))
METHODS_26 = METHODS_25 + METHOD.format(25)
MEMBERS = "  std::function<void(int)> member_ = {};\n"

CLEAN = {
    "CMakeLists.txt": "add_subdirectory(nvme)\n",
    "README.md": "# A house\n\nThe groups of a job are partitioned; a shard, CloseRank(), to recommend.\n",
    "docs/page.md": "new words, deleted words\nWhat continues a paragraph begins none.\n\n```\nOf a program\n```\n",
    "nvme/slot.h": "#pragma once\n// A slot.\n// Of two lines, the second begins nothing.\nint slot = 0;\n",
    ".ci/run": "#!/bin/sh\n",
    "protocol/word.h": '#pragma once\n#include <span>\n#include "absl/status/status.h"\n',
    "protocol/os/mutex.h": "#pragma once\nclass Mutex {\n  std::mutex mutex_;\n};\n",
    "nvme/volume.h": '#pragma once\n#include <liburing.h>\n#include "protocol/word.h"\n',
    "nvme/volume.cc": '#include "nvme/volume.h"\n#include "nvme/internal/map.h"\n'
    "// a new extent; goto, sleep(1) and getenv in a comment\n"
    'const char* kText = "new delete goto";\n'
    "Volume::Volume(const Volume&) = delete;\n"
    "auto raw = ::operator new(8, align);\n"
    "auto made = std::unique_ptr<Volume>(new Volume());\n"
    "template <typename Resource>\nvoid Retire(Resource resource);  // later\n"
    "app.policy(Policy::TakeAll());\n",
    "nvme/internal/map.h": "#pragma once\n",
    "nvme/large.h": "#pragma once\nclass Large : public Base<1> {\n public:\n  enum class State { kA, kB };\n"
    f"  explicit Large(int a) : a_(a) {{}}\n  Large(const Large&) = delete;\n{METHODS_25} private:\n{METHODS_26}"
    f"  friend class Other;\n{MEMBERS * 20}}};\nstruct Values {{\n{MEMBERS * 40}}};\n",
    "cpu_adam/kernel.cc": '#include "hwy/highway.h"\n#include "cpu_adam/kernel.h"\n',
    "cpu_adam/kernel.h": '#pragma once\n#include "protocol/optimizer_ids.h"\n',
    "protocol/optimizer_ids.h": "#pragma once\n",
    "daemon/main.cc": '#include <spdlog/spdlog.h>\n#include "nvme/volume.h"\nauto* home = std::getenv("HOME");\n',
    "client/environment.cc": 'auto* socket = std::getenv("FOREBAY_SOCKET");\n',
    "tools/forebay/bench_disk.cc": '#include "nvme/volume.h"\n#include "daemon/x.h"\n#include "client/y.h"\n',
    "tools/start": "#!/bin/sh\nsource tools/setup.sh\nexec python3 tests/main_job/job.py\n",
    "tools/train.py": "import json\nimport train_support\n",
    "tools/train_support.py": 'JOB = "tests/main_job/job.py"\n',
    "tests/main_job/job.py": "import main_claims\nimport train_support\n",
    "tests/main_job/main_claims.py": "import json\n",
    "tests/nvme/CMakeLists.txt": "forebay_add_test(volume_test SOURCES volume_test.cc)\n"
    "foreach(name\n    looped_test)\n",
    "tests/nvme/looped_test.cc": TEST_HEAD,
    "tests/nvme/volume_test.cc": TEST_HEAD
    + '#include "nvme/internal/map.h"\n#include "gtest/gtest.h"\n'
    'void F() { GTEST_SKIP() << "no disk"; }\n',
    "client/python/forebay/__init__.py": "import os\nfrom .api import attach\n",
    "client/python/forebay/api.py": "def attach():\n    from . import _core\n    from .states.reader import Reader\n",
    "client/python/forebay/_engine.py": "from . import _base, errors\nif TYPE_CHECKING:\n    from ._core import A\n",
    "client/python/forebay/sharded/__init__.py": "",
    "client/python/forebay/sharded/engine.py": "from . import boxes\nfrom .._engine import Engine\n",
    "client/python/forebay/states/__init__.py": "",
    "client/python/forebay/states/reader.py": "import forebay.sharded.engine\nfrom . import columns\nfrom forebay import errors\n",
}

COINED = (
    "the image of a group",
    "ImageBytes(group)",
    "a fetch wish",
    "the crew",
    "one team",
    "Outbox",
    "a GradientBook",
    "the book of arenas",
    "a picture of the node",
    "is spoilt",
    "doomed",
    "greeted_",
    "for ever",
    "mends it",
    "the set-up",
    "LoseRank(rank)",
    "FirstBlocker()",
    "TimeoutError_",
    "the last vote",
    "the verdict of a step",
    "settling",
    "struck from it",
    "relieves it",
    "donated",
    "unwanted",
    "another draw",
    "bypasses the cache",
    "the processors",
    "is told",
)

# rule: (path, content, line of the breach)
BREACHES = {
    "include": [
        ("pinned_mem/arena.cc", '#include "nvme/volume.h"\n', 1),
        ("protocol/up.cc", '\n#include "daemon/x.h"\n', 2),
        ("client/sideways.cc", '#include "daemon/x.h"\n', 1),
        ("tools/forebay/status.cc", '#include "nvme/volume.h"\n', 1),
    ],
    "internal": [("daemon/peek.cc", '#include "nvme/internal/map.h"\n', 1)],
    "floor": [
        ("daemon/core/job/job.cc", '#include "daemon/exec/reactor.h"\n', 1),
        ("daemon/exec/reactor.cc", '#include "daemon/control/rpc.h"\n', 1),
        ("daemon/core/step/step.cc", '#include "daemon/core/update/a.h"\n#include "daemon/core/job/job.h"\n', 2),
        ("daemon/core/loose.cc", '#include "daemon/core/base/events.h"\n', 1),
    ],
    "library": [
        ("client/wrong.cc", "#include <spdlog/spdlog.h>\n", 1),
        ("daemon/gpu.cc", "#include <cuda_runtime.h>\n", 1),
        ("nvme/schema.cc", '#include "protocol/forebay.capnp.h"\n', 1),
    ],
    "kernel": [
        ("cpu_adam/fat.cc", '#include "hwy/highway.h"\n#include "protocol/word.h"\n', 2),
        ("cpu_adam/kernel.h", '#pragma once\n\n#include "protocol/word.h"\n', 3),
    ],
    "import": [
        ("tools/run.py", "import json\nfrom main_claims import Claims\n", 2),
        ("tools/path.py", 'import sys\nsys.path.append(str(ROOT / "tests" / "main_job"))\n', 2),
        ("tools/begin", "#!/bin/sh\nset -e\nsource tests/main_job/setup.sh\n", 3),
        ("tools/begin.sh", '. "$ROOT/tests/setup.sh"\n', 1),
        ("client/python/forebay/_optimizer.py", "import os\nfrom . import api\n", 2),
        ("client/python/forebay/_plan.py", "def f():\n    from .states import reader\n", 2),
        ("client/python/forebay/_hooks.py", "if TYPE_CHECKING:\n    from .sharded.engine import E\n", 2),
        ("client/python/forebay/_guards.py", "from . import __version__\n", 1),
        ("client/python/forebay/sharded/fsdp.py", "from .. import errors\nfrom ..states import reader\n", 2),
        ("client/python/forebay/states/state_dict.py", "import os\nimport forebay._attach\n", 2),
        ("client/python/forebay/_unlisted.py", "", 1),
    ],
    "circle": [
        ("client/python/forebay/_base.py", "import os\n\nif TYPE_CHECKING:\n    from ._engine import E\n", 4),
        ("client/python/forebay/states/columns.py", "def f():\n    from .reader import Reader\n", 2),
        ("client/python/forebay/sharded/boxes.py", "from . import nodes\nfrom .engine import Engine\n", 2),
        ("client/python/forebay/errors.py", "import forebay.errors\n", 1),
    ],
    "goal": [("tests/nvme/other_test.cc", "\n// no goal\n", 1)],
    "unlisted": [("tests/nvme/lost_test.cc", TEST_HEAD, 1)],
    "size": [("nvme/long.cc", "int x;\n" * 801, 801)],
    "word": [
        ("nvme/a.cc", "// a blacklist\n", 1),
        ("nvme/b.cc", "\nabsl::Mutex mutex;\n", 2),
        ("nvme/c.cc", "TakeSlot();\n", 1),
        ("tools/c.py", "# TODO later\n", 1),
    ],
    "coinage": [
        (f"nvme/word{number}.h", f"#pragma once\n// {text}\n", 2)
        for number, text in enumerate(COINED)
    ],
    "opening": [
        ("nvme/of.h", "#pragma once\n// Of a slot: its path.\nint path = 0;\n", 2),
        ("nvme/behind.cc", 'auto* text = "// Of";  // As above\n', 1),
        ("tools/where.py", "import json\n\n# Where the answer is\nanswer = json.loads(text)\n", 3),
        ("tests/nvme/what_test.cc", "// Goal    What is written is read.\n// Method  A file.\n\n", 1),
        ("docs/those.md", "# A page\n\nThose who read it.\n", 3),
        ("docs/list.md", "# A page\n\n- a slot\n- Else nothing.\n", 4),
    ],
    "class": [
        ("nvme/methods.h", f"#pragma once\n\nclass Wide {{\n public:\n{METHODS_26}}};\n", 3),
        ("nvme/members.h", f"#pragma once\nclass Deep {{\n{MEMBERS * 21}}};\n", 2),
        ("nvme/methods_of_struct.cc", f"struct Value::Inner {{\n{METHODS_26}{MEMBERS * 30}}};\n", 1),
    ],
    "torn": [
        ("nvme/torn.h", "#pragma once\n  uint64_t count =\n      0;  // of something long\n", 2),
        ("nvme/call.cc", "FOREBAY_CHECK(\n    event.Done());  // of this device\n", 1),
        ("nvme/type.h", "#pragma once\n  uint64_t\n      count;  // of something long\n", 2),
        ("nvme/shift.h", "#pragma once\nint count = 1\n            << 18;  // large\n", 2),
    ],
    "goto": [("nvme/jump.cc", "void F() {\n  goto end;\n}\n", 2)],
    "ownership": [
        ("nvme/heap.cc", "int* F() {\n\n  return new int;\n}\n", 3),
        ("nvme/free.cc", "void F(int* p) {\n  delete p;\n}\n", 2),
    ],
    "sleep": [
        ("tests/support/wait.h", "#pragma once\ninline void F() { usleep(1); }\n", 2),
        ("tests/tools/wait.py", "import time\ntime.sleep(1)\n", 2),
    ],
    "getenv": [("nvme/env.cc", 'auto* x = std::getenv("X");\n', 1)],
    "suppression": [
        ("tests/tsan.supp", "", 1),
        ("nvme/quiet.cc", '__attribute__((no_sanitize("thread"))) void F();\n', 1),
    ],
    "skip": [("tests/support/skip.cc", "void F() { GTEST_SKIP(); }\n", 1)],
    "disabled": [("tests/support/off.cc", "TEST(Volume, DISABLED_Holds) {}\n", 1)],
    "folder": [("extras/readme.md", "", 1)],
    "pragma": [("nvme/bare.h", "int x;\n", 1)],
}


def write(root, files):
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")


def found(root):
    return sorted((path, number, rule) for path, number, rule, _ in house.breaches(root))


def expected(rule, path, line):
    return (path.split("/")[0] if rule == "folder" else path, line, rule)


class House(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        write(self.root, CLEAN)
        listed = "".join(path.split("/")[-1] + "\n" for path, _, _ in BREACHES["goal"] + BREACHES["opening"])
        write(self.root, {"tests/nvme/CMakeLists.txt": CLEAN["tests/nvme/CMakeLists.txt"] + listed})

    def test_a_clean_tree_has_no_breach(self):
        self.assertEqual(found(self.root), [])

    def test_each_breach_is_reported_and_nothing_else(self):
        for rule, cases in BREACHES.items():
            for path, text, line in cases:
                with self.subTest(rule=rule, path=path):
                    write(self.root, {path: text})
                    self.assertEqual(found(self.root), [expected(rule, path, line)])
                    (self.root / path).unlink()

    def test_all_breaches_at_once_are_all_reported(self):
        everything = []
        for rule, cases in BREACHES.items():
            for path, text, line in cases:
                write(self.root, {path: text})
                everything.append(expected(rule, path, line))
        self.assertEqual(found(self.root), sorted(everything))

    def test_a_reason_silences_its_rule_alone(self):
        write(self.root, {"nvme/jump.cc": "// house: allow goto: the exemplar of one\ngoto end;\n"})
        self.assertEqual(found(self.root), [])
        write(self.root, {"nvme/jump.cc": "// house: allow size: a table\ngoto end;\n"})
        self.assertEqual(found(self.root), [("nvme/jump.cc", 2, "goto")])
        write(self.root, {"nvme/jump.cc": "// house: allow goto:\ngoto end;\n"})
        self.assertEqual(found(self.root), [("nvme/jump.cc", 2, "goto")])

    def test_every_rule_has_a_breach_here(self):
        text = (Path(house.__file__)).read_text(encoding="utf-8")
        rules = set(__import__("re").findall(r'yield [^\n]*?, "([a-z]+)", ', text))
        self.assertEqual(rules, {*BREACHES, "licence"})

    def test_a_tree_with_a_licence_names_it_in_each_file(self):
        line = house.LICENCE
        write(self.root, {"LICENSE": "Apache\n"})
        self.assertEqual({rule for _, _, rule in found(self.root)}, {"licence"})
        for path in CLEAN:
            comment = "//" if path.endswith((".h", ".cc")) else "#"
            if path.split("/")[0] in house.ROOMS:
                write(self.root, {path: f"{comment} {line}\n" + (self.root / path).read_text(encoding="utf-8")})
        self.assertEqual(found(self.root), [])
        write(self.root, {"tools/script": f"#!/bin/sh\n# {line}\n", "tools/lines.cc": f"// {line}\n" + "int x;\n" * 800})
        self.assertEqual(found(self.root), [])
        write(self.root, {"tools/script": "#!/bin/sh\n", "tools/lines.cc": f"// {line}\n" + "int x;\n" * 801})
        self.assertEqual(found(self.root), [("tools/lines.cc", 802, "size"), ("tools/script", 1, "licence")])

    def test_a_breach_fails_the_program(self):
        self.assertEqual(house.main(["house.py", str(self.root)]), 0)
        write(self.root, {"nvme/bare.h": "int x;\n"})
        self.assertEqual(house.main(["house.py", str(self.root)]), 1)
        self.assertEqual(house.main(["house.py"]), 2)


if __name__ == "__main__":
    unittest.main()
