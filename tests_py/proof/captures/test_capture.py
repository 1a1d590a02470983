# SPDX-License-Identifier: Apache-2.0
"""Captures record what calls planned and exchanged, and are read again; commands use them."""

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import numpy as np
import pytest

import cpattn
from cpattn.captures import capture, recorder
from cpattn.captures.lines import to_line
from cpattn.profiling import calls
from cpattn_proof import NotUsable, read_captures
from cpattn_proof.captures import Capture, RecordedCall
from cpattn_proof.captures.records import Room, from_line
from cpattn_proof.captures.remade import remake
from support.command_line import invoke

HEADS = {"page_size": 8, "num_pages": 4, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16}
BATCH = {"q_lens": [3, 2], "kv_lens": [10, 2], "block_tables": [[2, 0], [1, -1]]}


def plan(*lens, cp_rank=0, cp_size=2):
    return cpattn.build_cp_metadata(*lens, cp_rank=cp_rank, cp_size=cp_size)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.cpcap"


@pytest.fixture
def recorded(path):
    with capture(path):
        plan([10], [12])
    return path


def test_batches_come_back_in_their_order(path):
    lens = np.array([10, 14])
    with capture(path):
        plan(lens, [15, 14], cp_rank=1)
        lens[:] = 5  # callers fill their buffers again
        cpattn.build_cp_metadata_all_ranks([3, 0], cp_size=4, strategy="interleave")
    plan([1])  # no longer recorded
    first, second = read_captures([path]).batches
    assert (first.extend_lens, first.seq_lens) == ([10, 14], [15, 14])
    assert (second.extend_lens, second.seq_lens) == ([3, 0], [3, 0])
    assert second.call.name == "build_cp_metadata_all_ranks"
    assert calls.listeners == []
    header, record, _ = map(json.loads, path.read_text().splitlines())
    assert header["schema"] == "cpattn-capture/1"
    assert record["call"] == "build_cp_metadata"


def test_plans_within_others_are_no_batches_of_their_own():
    """Time alone decides which plan lies within another one, as threads may plan meanwhile."""
    random = np.random.default_rng(0)
    for _ in range(50):
        spans = random.integers(0, 30, (40, 2)).tolist()
        names = random.choice(["ContextParallel.plan", *["build_cp_metadata"] * 4], 40)
        outer = [(at, at + n) for (at, n), name in zip(spans, names, strict=True) if "." in name]
        made, expected = [], []
        for (at, n), name in zip(spans, names, strict=True):
            lens = np.array([at])
            made.append(RecordedCall(name, 0, at, n, {"extend_lens": lens, "seq_lens": lens}))
            if "." in name or not any(a <= at and at + n <= b for a, b in outer):
                expected.append(made[-1])
        assert [batch.call for batch in Capture(({"rank": 0},), tuple(made)).batches] == expected


def test_attention_is_recorded_by_plan_and_never_by_element(path):
    random = np.random.default_rng(0)
    q, cache = (random.random(shape, np.float32) for shape in [(5, 2, 16), (4, 8, 1, 16)])
    with capture(path):
        for _ in range(2):
            planned = cpattn.plan_attention(**BATCH, **HEADS)
            for _ in range(3):
                cpattn.run_attention(planned, q, cache, cache)
    run = read_captures([path])
    assert [batch.seq_lens for batch in run.batches] == [[10, 2]] * 2
    runs = run.of("run_attention")
    assert [run.fields["plan"] for run in runs] == [0, 0, 0, 1, 1, 1]
    assert runs[0].fields == {"plan": 0, "shape": [5, 2, 16], "dtype": "float32"}
    (first, _) = run.of("plan_attention")
    assert first.fields["page_ids"].tolist() == [2, 0, 1]
    assert all(call.seconds >= 0 and call.at >= 0 for call in run.calls)
    assert path.stat().st_size < 4000  # the rows alone would be larger


def test_plans_are_made_again_and_compared(path):
    with capture(path):
        for size, cuts in ((1, {}), (2, {"weights": [1.5, 4], "page_size": 8}), (5, {})):
            cpattn.build_cp_metadata_all_ranks([40, 7], [50, 7], cp_size=size, **cuts)
            plan([40, 7], [50, 7], cp_rank=size - 1, cp_size=size)
        cpattn.plan_attention(**BATCH, **HEADS, window=4, batch_invariant=True)
        cpattn.plan_attention(**BATCH, **HEADS, window=(4, None), causal=False)
        cpattn.plan_attention(**BATCH, **HEADS, custom_mask=np.ones(3 * 10 + 2 * 2, bool))
    report, kinds = remake(read_captures([path]))
    assert report.proved
    assert {kind.name: (len(kind.here), kind.left_out) for kind in kinds} == {
        "build_cp_metadata_all_ranks": (3, 0),
        "build_cp_metadata": (3, 0),
        "plan_attention": (2, 1),  # masks are not recorded
    }


def test_transfers_are_recorded_by_their_blocks(path):
    from cpattn.transfer import KVEntry, KVLayout, plan_kv_links, plan_kv_transfer

    def layout(addr):
        return KVLayout([KVEntry(0, "k", False, addr, 1024, 512)], page_size=8, total_kv_heads=2)

    with capture(path):
        planned = plan_kv_transfer(layout(4096), layout(8192), [0, 1], [1, 0], num_tokens=16)
        plan_kv_links([layout(4096)], [layout(8192)], [[0]], [[1]])
    transfer, links = read_captures([path]).calls
    for name in ("src_addrs", "dst_addrs", "lengths"):
        assert transfer.fields[name].tolist() == getattr(planned, name).tolist()
    assert [(link["source"], link["destination"]) for link in links.fields["links"]] == [(0, 0)]


def test_calls_of_several_threads_and_captures_are_all_there(path, tmp_path):
    def plan_often():
        for _ in range(50):
            plan([10])

    with capture(path), capture(tmp_path / "other.cpcap"), ThreadPoolExecutor(4) as threads:
        for _ in range(4):
            threads.submit(plan_often)
    for name in (path, tmp_path / "other.cpcap"):
        assert len(read_captures([name]).calls) == 200


def test_a_call_that_fails_is_not_recorded_and_a_capture_of_nothing_not_judged(path):
    with capture(path), pytest.raises(ValueError, match="cp_rank"):
        plan([10], cp_rank=2)
    run = read_captures([path])
    assert run.calls == run.batches == ()
    report, kinds = remake(run)
    assert kinds == []
    assert report.not_checked == {"OWN": "there is no plan in the capture"}


def test_a_file_of_its_own_for_each_process(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    with capture(tmp_path / "{rank}-{pid}.cpcap") as path:
        plan([10])
    assert (path.name, read_captures([path]).ranks) == (f"3-{os.getpid()}.cpcap", (3,))
    with pytest.raises(FileExistsError):
        capture(path).__enter__()
    monkeypatch.setenv("RANK", "-5")
    with pytest.raises(ValueError, match=r"capture: RANK .* >= 0, got '-5'"):
        capture(path).__enter__()
    assert calls.listeners == []


def test_a_forked_child_records_nothing(path):
    with capture(path):
        child = os.fork()
        if not child:
            plan([10])
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        plan([20])
    (batch,) = read_captures([path]).batches
    assert batch.extend_lens == [20]


@pytest.mark.parametrize("error", [OSError(28, "No space left"), TypeError("No record")])
def test_what_cannot_be_written_is_said_at_the_end(path, error):
    broken = mock.patch.object(recorder, "to_line", side_effect=error)
    with broken, pytest.raises(type(error), match="No"), capture(path):
        plan([10])
    assert calls.listeners == []


WHOLE_LIFE = """
import os, signal, cpattn
from cpattn.captures.recorder import capture_by_environment
for _ in range(2):
    capture_by_environment()
cpattn.build_cp_metadata([10], cp_rank=0, cp_size=2)
"""


def test_the_environment_records_a_process_for_its_life(tmp_path, children):
    environment = os.environ | {"CPATTN_CAPTURE": str(tmp_path / "run")}
    children.python(WHOLE_LIFE, env=environment)
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("run.")
    assert len(read_captures([path]).batches) == 1


CALL = b'{"call":"x","at":0,"seconds":0,"a":{%s}}'
#: The bytes are two int32.
TWO = b'"zlib":"eJxjYIAAAAAIAAE=","dtype":"int32","shape":'
NO_HEADER = (
    b"\n"
    b"{}\n"
    b'{"schema":"cpattn-capture/2","rank":0}\n'
    b'{"schema":"cpattn-capture/1","rank":"a"}\n'
    b'{"schema":{"zlib":"eJwDAAAAAAE=","dtype":"int32","shape":[0]},"rank":0}\n'
)
NO_RECORD = [
    b"[]", b"{", b"[" * 100_000, b'{"call":"plan_attention","at":0}',
    CALL % b'"zlib":"eJwDAAAAAAE=","dtype":"object"', CALL % b'"zlib":"AAAA","dtype":"int32"',
    CALL % b'"zlib":7,"dtype":"int32"',
    *(CALL % (TWO + shape) for shape in (b"null", b"[1,-1]", b"[1000000000000]", b"[3]")),
    b'{"call":7,"at":0,"seconds":0}', b'{"call":"x","at":NaN,"seconds":0}',
    b'{"call":"x","at":1%s,"seconds":0}' % (b"0" * 400),  # no float64 is so large
    b'{"call":"x","at":0,"seconds":-1}', b'{"call":"x","call":"y","at":0,"seconds":0}',
]  # fmt: skip


def test_damaged_files_are_refused_by_line(recorded):
    header, record = recorded.read_bytes().splitlines()
    files = [(text, record) for text in NO_HEADER.splitlines()]
    for lines in [*files, *((header, text) for text in NO_RECORD)]:
        recorded.write_bytes(b"%s\n%s\n" % lines)
        with pytest.raises(NotUsable, match=r"run\.cpcap(, line \d+)?: "):
            read_captures([recorded])


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("extend_lens", None, None),
        ("extend_lens", 7, "extend_lens must be an array of 1 dimensions"),
        ("extend_lens", np.array([-1]), "extend_lens must be .* ints from 0"),
        ("extend_lens", np.array([1 << 30]), "extend_lens must be .* together at most"),
        ("extend_lens", np.zeros(1 << 21, int), "extend_lens must be .* 1048576 of them at most"),
        ("num_tokens", 10**12, "num_tokens must be an int from 0 to .* got 1000000000000"),
        ("strategy", "two\nlines", "strategy must be a printable string, got 'two"),
        ("cp_size", True, "cp_size must be an int from 1 to 32768, got True"),
        ("digests", [1], "digests must be a list, each a printable string"),
    ],
)
def test_fields_are_checked_by_line(recorded, field, value, rule):
    header, record = map(from_line, recorded.read_bytes().splitlines())
    recorded.write_bytes(to_line(header) + to_line({**record, field: value}))
    if rule is None:
        assert len(read_captures([recorded]).calls) == 1
    else:
        with pytest.raises(NotUsable, match=rf"run\.cpcap, line 2: {rule}") as raised:
            read_captures([recorded])
        assert len(str(raised.value)) < 300
    del record[field]
    recorded.write_bytes(to_line(header) + to_line(record))
    with pytest.raises(NotUsable, match=f"line 2: has no '{field}'"):
        read_captures([recorded])


@pytest.mark.parametrize(
    "peers", [{"x": 1}, {"01": 1}, {"-1": 1}, {"99999999999": 1}, {"1": -1}, {"1": 1.5}, [1]]
)
def test_messages_are_bytes_by_rank(path, peers):
    header = {"schema": "cpattn-capture/1", "cpattn": "0", "isa": "", "host": "", "rank": 0}
    post = {"call": "RowExchange.post", "at": 0, "seconds": 0, "cp_rank": 0, "exchange": "write_kv"}
    for way, other in (("sends", "receives"), ("receives", "sends")):
        path.write_bytes(to_line(header) + to_line({**post, way: peers, other: {}}))
        with pytest.raises(NotUsable, match=f"line 2: {way} must be bytes by the number of a rank"):
            read_captures([path])


def test_files_that_cannot_be_read_together_are_named(recorded, tmp_path):
    other = tmp_path / "other.cpcap"
    other.write_bytes(recorded.read_bytes())
    with pytest.raises(NotUsable, match=r"another rank, got ranks \[0, 0\]"):
        read_captures([recorded, other])
    other.write_bytes(recorded.read_bytes().splitlines(keepends=True)[0])  # only the header
    assert len(read_captures([recorded, other]).calls) == 1
    with pytest.raises(NotUsable, match="Is a directory"):
        read_captures([tmp_path])
    with pytest.raises(NotUsable, match="at least one file"):
        read_captures([])


def test_a_plan_that_cannot_be_made_again_is_not_judged(recorded):
    text = recorded.read_text().replace('"strategy":"zigzag"', '"strategy":"sideways"')
    recorded.write_text(text)
    with pytest.raises(NotUsable, match=r"build_cp_metadata of rank 0, .*: cannot be made again"):
        remake(read_captures([recorded]))


def test_arrays_come_back_with_dtype_and_shape():
    arrays = {"a": np.arange(6, dtype=np.int32).reshape(2, 3), "b": np.array([2**63], np.uint64)}
    line = to_line({**arrays, "n": np.int64(4), "call": "x"})
    assert (back := from_line(line, Room(32), {"y": ()}))["n"] == 4
    for name, array in arrays.items():
        assert back[name].dtype == array.dtype
        assert back[name].tolist() == array.tolist()
    assert set(from_line(line, Room(24), {"x": ("a",)})) == {"a", "n", "call"}
    with pytest.raises(ValueError, match="arrays must have at most 2147483648 bytes together"):
        from_line(line, Room(31))
    with pytest.raises(TypeError, match="no record has a set"):
        to_line({"a": {1}})


# Users call `cpattn replay --capture` and `cpattn plan --capture`.


def run(*arguments, status=0):
    result = invoke(*map(str, arguments))
    assert result.exit_code == status, result.output
    return result.output


@pytest.fixture
def two_plans(tmp_path):
    with capture(tmp_path / "run.cpcap") as path:
        for length in (4000, 9000):
            cpattn.build_cp_metadata([length], [length + 512], cp_rank=0, cp_size=2)
    return path


def test_recorded_plans_are_made_again(two_plans, tmp_path):
    *_, verdict = lines = run(
        "replay", "--capture", two_plans, "--json", tmp_path / "report.json"
    ).splitlines()
    assert re.match(r"rank 0: 2 calls in \d+\.\d{3} s, cpattn ", lines[0])
    (row,) = (line.split() for line in lines if line.startswith("build_cp_metadata"))
    assert row[1] == "2"
    assert re.fullmatch(r"2 plans: proved: OWN \(\d+\.\d s\)", verdict)
    assert json.loads((tmp_path / "report.json").read_text())["proved"]


def test_plans_of_another_version_are_refuted(two_plans):
    text = two_plans.read_text().replace('"strategy":"zigzag"', '"strategy":"contiguous"')
    two_plans.write_text(text)
    output = run("replay", "--capture", two_plans, status=1)
    assert "OWN: 2 of 2 plans differ from those recorded" in output
    assert "rank 0: build_cp_metadata, " in output


def test_a_process_that_was_killed_is_named(two_plans):
    two_plans.write_bytes(two_plans.read_bytes()[:-9])
    of_killed = read_captures([two_plans])
    assert len(of_killed.batches) == 1
    assert of_killed.truncated == (two_plans,)
    output = run("replay", "--capture", two_plans)
    assert f"{two_plans}: its last line is not whole, its process was ended" in output


def test_recorded_batches_are_predicted_over_other_ranks(two_plans):
    output = run("plan", "--capture", two_plans, "--cp-size", "16", "--strategy", "zigzag")
    assert output.startswith("2 batches, 13,000 new tokens; ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("replay", "--cp-size", "4"), "--capture makes recorded plans again: beside it goes"),
        (("plan", "--tokens", "9"), "a batch comes from one of "),
        (("lint",), "from_capture: there is no call of ContextParallel.plan"),
    ],
)
def test_what_does_not_go_with_a_capture_is_refused(two_plans, arguments, message):
    assert message in run(*arguments, "--capture", two_plans, status=2)


def test_a_capture_of_nothing_has_nothing_to_share_out_or_make_again(tmp_path):
    with capture(tmp_path / "run.cpcap") as path:
        pass
    assert "no batch with new tokens in it" in run("plan", "--capture", path, status=2)
    assert "not checked: OWN (there is no plan" in run("replay", "--capture", path, status=2)


@pytest.mark.parametrize("command", ["plan", "replay", "lint", "simulate"])
def test_what_is_no_capture_or_not_there_cannot_be_judged(command, tmp_path):
    assert "missing" in run(command, "--capture", tmp_path / "missing", status=2)
    (tmp_path / "notes").write_text("hello\n")
    output = run(command, "--capture", tmp_path / "notes", status=2)
    assert "notes, line 1: no record of a capture" in output
