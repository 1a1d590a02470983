# SPDX-License-Identifier: Apache-2.0
"""The KV cache of a prompt moves from a prefill server to a decode server.

    python examples/move_kv.py                   # both servers in this process
    python examples/move_kv.py --engine mooncake # two processes, over TCP on this machine

Needs NumPy; the second form `pip install '.[mooncake]'` and three system libraries. Prefill has
two pipeline stages with a pool each and pages of 16 tokens, decode has all four layers in one
pool and pages of 32. The two sides tell each other where their buffers are, prefill plans and
writes, and both sum up what they have, token by token: the sums must be equal.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import zlib
from multiprocessing.connection import Connection

import numpy as np

from cpattn.kv import MHATokenToKVPool
from cpattn.transfer import KVLayout, LocalEngine, plan_kv_transfer, register

MODEL = {"num_kv_heads": 2, "head_dim": 64, "dtype": "float32", "container": "numpy"}
LAYERS, NUM_TOKENS = 4, 90
PREFILL_PAGES, DECODE_PAGES = [3, 4, 9, 10, 1, 7], [5, 6, 2]  # of this prompt, at either side


def make_engine(name: str):
    if name == "local":
        return LocalEngine()
    from cpattn.integrations.mooncake import MooncakeEngine

    return MooncakeEngine("127.0.0.1")


def slots_of(pages: list[int], page_size: int) -> list[int]:
    """Rows of the pool for the tokens of the prompt."""
    places = range(NUM_TOKENS)
    return [pages[i // page_size] * page_size + i % page_size for i in places]


def checksum(pools: list[MHATokenToKVPool], pages: list[int]) -> str:
    """Of all keys and values of the prompt, in the order of layers and tokens."""
    total = 0
    for pool in pools:
        slots = slots_of(pages, pool.page_size)
        for layer in range(pool.start_layer, pool.end_layer):
            for buffer in pool.get_kv_buffer(layer):
                rows = buffer.reshape(-1, *buffer.shape[-2:])[slots]
                total = zlib.crc32(rows.tobytes(), total)
    return f"{total:08x}"


class Decode:
    """The receiver: registers its pool, says where it is, and waits to be told of the end."""

    def __init__(self, engine_name: str) -> None:
        self.pool = MHATokenToKVPool(size=512, page_size=32, num_layers=LAYERS, **MODEL)
        self.engine = make_engine(engine_name)
        register(self.engine, self.pool)

    def hello(self) -> str:
        layout = KVLayout.from_pool(self.pool)
        session = self.engine.session_id
        return json.dumps({"session": session, "layout": layout.to_dict(), "pages": DECODE_PAGES})


def prefill(hello: str, engine_name: str) -> str:
    """The sender: fills its pools as a model would, plans against the message, and writes."""
    message = json.loads(hello)
    target = KVLayout.from_dict(message["layout"])
    rng = np.random.default_rng(0)
    stages = [
        MHATokenToKVPool(size=256, page_size=16, num_layers=2, start_layer=first, **MODEL)
        for first in (0, 2)
    ]
    engine = make_engine(engine_name)
    register(engine, *stages)
    for stage in stages:
        for layer in range(stage.start_layer, stage.end_layer):
            k, v = rng.standard_normal((2, NUM_TOKENS, 2, 64), np.float32)
            stage.set_kv_buffer(layer, slots_of(PREFILL_PAGES, stage.page_size), k, v)
        source = KVLayout.from_pool(stage, layers=(stage.start_layer, stage.end_layer))
        plan = plan_kv_transfer(source, target, PREFILL_PAGES, message["pages"])
        status = plan.execute(engine, message["session"])  # a TransferError, if it fails
        print(f"prefill: layers {stage.start_layer} and {stage.end_layer - 1}:", end=" ")
        print(f"{status.blocks_done} blocks, {status.bytes_done:,} bytes")
    engine.close()
    return checksum(stages, PREFILL_PAGES)


def decode_process(connection: Connection, engine_name: str) -> None:
    decode = Decode(engine_name)
    connection.send(decode.hello())
    connection.recv()  # all is written
    connection.send(checksum([decode.pool], DECODE_PAGES))
    decode.engine.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--engine", choices=["local", "mooncake"], default="local")
    name = parser.parse_args().engine
    if name == "local":
        decode = Decode(name)
        sent, received = prefill(decode.hello(), name), checksum([decode.pool], DECODE_PAGES)
    else:
        spawn = multiprocessing.get_context("spawn")  # an engine has threads: never fork
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=decode_process, args=(theirs, name))
        process.start()
        theirs.close()  # so that the end of that process ends the wait here
        sent = prefill(ours.recv(), name)
        ours.send("done")
        received = ours.recv()
        process.join()
    print(f"checksums: prefill {sent}, decode {received}")
    if sent != received:
        raise SystemExit("the caches differ")
