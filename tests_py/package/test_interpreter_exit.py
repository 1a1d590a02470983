# SPDX-License-Identifier: Apache-2.0
"""The interpreter ends while daemon threads are inside calls; a sub-interpreter is refused."""

import pytest

SCRIPT = """
import threading, time
import numpy as np
import cpattn

cpattn.set_num_threads(1)
cache = np.ones((256, 16, 1, 64), np.float32)
q = np.ones((2048, 2, 64), np.float32)
batch = dict(q_lens=[2048], kv_lens=[4096], block_tables=[list(range(256))])
out, lse = np.ones((2048, 8, 64), np.float32), np.ones((2048, 8), np.float32)
score = np.ones((512, 4096), np.float32)


def calls():
    cpattn.paged_attention(q, cache, cache, **batch)
    cpattn.merge_state(out.copy(), lse.copy(), out, lse)
    cpattn.sparse.sglang_0_5_23.fast_topk(score, [4096] * 512, 64)
    cpattn.plan_attention(
        q_lens=[1] * 4000, kv_lens=[4096] * 4000, block_tables=np.zeros((4000, 256), np.int32),
        page_size=16, num_pages=256, num_heads=2, num_kv_heads=1, head_dim=64)


def forever():
    while True:
        calls()


calls()
for _ in range(6):
    threading.Thread(target=forever, daemon=True).start()
time.sleep({seconds})
print("done", flush=True)
"""


@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.3])
def test_exit_does_not_abort_daemon_threads(children, seconds):
    run = children.python(SCRIPT.replace("{seconds}", str(seconds)))
    assert (run.stdout, run.stderr) == ("done\n", "")


IMPORT = "try: import cpattn\nexcept ImportError as error: print(error, flush=True)"
IN_ANOTHER = """
try: import _interpreters as interpreters
except ImportError: import _xxsubinterpreters as interpreters
interpreters.run_string(interpreters.create(), {code!r})
"""


def test_a_sub_interpreter_gets_an_import_error(children):
    run = children.python(IN_ANOTHER.format(code=IMPORT))
    assert "interpreter" in run.stdout, run.stderr
