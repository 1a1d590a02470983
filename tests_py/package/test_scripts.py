# SPDX-License-Identifier: Apache-2.0
"""Scripts find text that begins without a subject, and loops in machine code of Arm."""

import arm_model
import first_words

RULES = 'words = ["Of", "The same", "This"]\n[allowed]\n"This rank" = "a name"\n'
PYTHON = '''"""of a module"""
class Pool:
    """This rank's pool."""
    def size(self):
        """Return
        of what."""
    size = """Of no docstring."""
Pool.__doc__ = """The
  same."""
add("--size", help="of a pool")
'''
CPP = """/// The size
/// of which the second line begins so
int size();  // Of a comment beside code
/// Of-a-word, oftentimes.
int words();
/// This, too.
"""
FAULTS = """cpp/meta/pool.h:6: begins with 'This': This, too.
python/cpattn/kv/pool.py:1: begins with 'of': of a module
python/cpattn/kv/pool.py:8: begins with 'The same': The same.
python/cpattn/kv/pool.py:10: begins with 'of': of a pool
"""


def test_each_place_is_found(tmp_path, monkeypatch, capsys):
    (tmp_path / "rules.toml").write_text(RULES)
    monkeypatch.setattr(first_words, "ROOT", tmp_path)
    monkeypatch.setattr(first_words, "RULES", tmp_path / "rules.toml")
    for name, text in {"python/cpattn/kv/pool.py": PYTHON, "cpp/meta/pool.h": CPP}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    assert first_words.main() == 1
    said = capsys.readouterr().out
    assert [line for line in FAULTS.splitlines() if line not in said] == []
    assert said.count("begins with") == 4
    (tmp_path / "rules.toml").write_text('words = ["Behind"]\n[allowed]\n')
    assert first_words.main() == 0


DISASSEMBLY = """
0000000000000000 <void cpattn::kernels::(anonymous namespace)::multiply<4>(float*)>:
   0:	ldr	q0, [x0]
   4:	cbz	x1, 28 <void multiply<4>(float*)+0x28>
   8:	ldr	s1, [x2]
   c:	fmla	v2.4s, v0.4s, v1.s[0]  // by element
  10:	cmp	x0, x1
  14:	b.ne	8 <void multiply<4>(float*)+0x8>
  18:	b	0 <void multiply<4>(float*)>
  1c:	ldr	q3, [x3]
  20:	add	x3, x3, #0x10
  24:	b.ne	1c <void multiply<4>(float*)+0x1c>
  28:	ret
"""


def test_loops_without_branches_that_multiply_are_found():
    (loop,) = arm_model.loops_of(DISASSEMBLY)
    assert loop.function == "void multiply<4>(float*)"
    assert loop.lines == (
        "ldr\ts1, [x2]", "fmla\tv2.4s, v0.4s, v1.s[0]", "cmp\tx0, x1"
    )  # fmt: skip
    assert loop.num_products == 1
