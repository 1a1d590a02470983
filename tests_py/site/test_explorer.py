# SPDX-License-Identifier: Apache-2.0
"""docs/explorer, in a real browser, has the library's numbers, and anyone can use it."""

import json
import random
import shlex
import subprocess
import sys
from urllib.parse import urlencode

import numpy as np
import pytest

import cpattn
from cpattn_lab.cost_model import AttentionLayer, rank_work
from support import chromium
from support.places import ROOT
from support.tolerances import RATIO

PAGE = ROOT / "docs" / "explorer" / "explorer.html"
STRATEGIES = ("zigzag", "interleave", "contiguous")
START = "zigzag over 4 ranks: 2 sequences, 34 new tokens."


@pytest.fixture(scope="module")
def page():
    with chromium.started() as browser, chromium.page_of(browser, PAGE) as page:
        yield page


def show(page, address=""):
    """Open the page with this address, which begins with #."""
    page.goto("about:blank")
    page.goto(PAGE.as_uri() + address)


def status(page):
    return page.get_by_role("status").inner_text()


def random_batch(rng):
    num = rng.choice([1, 1, 2, 3, 6])
    most = rng.choice([3, 40, 40, 3000])
    return {
        "extend": [rng.choice([0, rng.randint(1, most), rng.randint(1, most)]) for _ in range(num)],
        "prefix": [rng.choice([0, rng.randint(0, 5000)]) for _ in range(num)],
        "ranks": rng.choice([1, 2, 3, 4, 5, 8, 16, 64]),
        "strategy": rng.choice(STRATEGIES),
        "pageSize": rng.choice([1, 16, 128]),
        "heads": rng.choice([1, 2, 8]),
        "headDim": rng.choice([64, 128, 576]),
        "dtype": rng.choice(["bfloat16", "float16", "float32"]),
    }


def expected_plan(batch):
    extend, strategy, heads = batch["extend"], batch["strategy"], batch["heads"]
    sizes = {"extend_lens": extend, "cp_size": batch["ranks"], "strategy": strategy}
    lengths = [a + b for a, b in zip(extend, batch["prefix"], strict=True)]
    layer = AttentionLayer(
        num_heads=heads, num_kv_heads=heads, head_dim=batch["headDim"], dtype=batch["dtype"],
        num_layers=1, page_size=batch["pageSize"],
    )  # fmt: skip
    plans = cpattn.build_cp_metadata_all_ranks(seq_lens=lengths, **sizes)
    work = rank_work(seq_lens=lengths, **sizes, layer=layer)
    owners = np.empty(sum(extend), dtype=int)
    for plan in plans:
        owners[plan.local_q_indices] = plan.cp_rank
    interleave, zigzag = strategy == "interleave", strategy == "zigzag"
    return {
        "owners": owners.tolist(),
        "tokens": work.tokens.tolist(),
        "pairs": work.pairs.tolist(),
        "sentBytes": work.sent_bytes.tolist(),
        "receivedBytes": work.received_bytes.tolist(),
        "queries": [list(plan.rows_per_request()) if interleave else [] for plan in plans],
        "prevQueries": [[] if interleave else plan.actual_seq_q_prev_list for plan in plans],
        "nextQueries": [plan.actual_seq_q_next_list if zigzag else [] for plan in plans],
        "prevKeys": [[] if interleave else plan.kv_len_prev_list for plan in plans],
        "nextKeys": [plan.kv_len_next_list if zigzag else [] for plan in plans],
        "imbalance": work.imbalance,
        "pageBytes": layer.pool_bytes(np.array(lengths)),
        "paddedRows": plans[0].pad_to_physical().per_rank_actual_token[0],
        "applies": cpattn.can_apply_cp(**sizes),
    }


PLANS_OF_THE_PAGE = """batches => JSON.stringify(batches.map(batch => {
  const plan = cpattnPlan.makePlan(batch);
  const perRank = ["tokens", "pairs", "sentBytes", "receivedBytes", "queries", "prevQueries",
                   "nextQueries", "prevKeys", "nextKeys"];
  const whole = ["imbalance", "pageBytes", "paddedRows", "applies"];
  return Object.fromEntries([
    ["owners", cpattnPlan.ownersOf(plan)],
    ...perRank.map(name => [name, plan.perRank.map(each => each[name])]),
    ...whole.map(name => [name, plan[name]]),
  ]);
}))"""


def test_200_random_plans_are_those_of_the_library(page):
    rng = random.Random(20)
    batches = [random_batch(rng) for _ in range(200)]
    assert len({(batch["strategy"], batch["ranks"] > 1) for batch in batches}) == 6
    found = json.loads(page.evaluate(PLANS_OF_THE_PAGE, batches))
    for batch, plan in zip(batches, found, strict=True):
        expected = expected_plan(batch)
        assert plan.pop("imbalance") == pytest.approx(expected.pop("imbalance"), rel=RATIO), batch
        assert plan == expected, json.dumps(batch)


def test_counts_are_exact_up_to_the_largest_batch_that_it_takes(page):
    batch = {"extend": [2**25 - 1], "prefix": [1], "ranks": 256, "strategy": "contiguous"}
    batch |= {"pageSize": 16, "heads": 128, "headDim": 576, "dtype": "float32"}
    layer = AttentionLayer(num_heads=128, num_kv_heads=128, head_dim=576, dtype="float32")
    work = rank_work([2**25 - 1], [2**25], cp_size=256, strategy="contiguous", layer=layer)
    code = "batch => cpattnPlan.makePlan(batch).perRank.map(x => [x.pairs, x.sentBytes])"
    found = page.evaluate(code, batch)
    assert found == np.stack([work.pairs, work.sent_bytes], axis=1).tolist()


def cells_of(page, name):
    rows = "[...t.tBodies[0].rows].map(row => [...row.cells].map(cell => cell.textContent))"
    return page.get_by_role("table", name=name).evaluate(f"t => {rows}")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_page_shows_the_numbers_of_its_plan(page, strategy):
    batch = {"extend_lens": [8192, 901], "seq_lens": [12288, 901], "cp_size": 8}
    work = rank_work(**batch, strategy=strategy)
    plan = cpattn.build_cp_metadata_all_ranks(**batch, strategy=strategy)[3]
    show(page, f"#extend=8192,901&prefix=4096,0&ranks=8&strategy={strategy}")
    page.get_by_text("Blocks of each rank").click()
    mean = work.pairs.mean()
    assert [row[:4] for row in cells_of(page, "What each rank has to do")] == [
        [f"{rank}", f"{tokens:,}", f"{pairs:,}", f"{pairs / mean:.2f} ×"]
        for rank, (tokens, pairs) in enumerate(zip(work.tokens, work.pairs, strict=True))
    ]
    assert f"The busiest rank has {work.imbalance:.2f} × the mean work." in status(page)
    blocks = cells_of(page, "Blocks")
    if strategy == "interleave":
        assert blocks[3] == ["0", "3", f"{plan.rows_per_request()[0]:,}"]
    else:
        assert blocks[3][3] == f"{plan.kv_len_prev_list[0]:,}"
        assert blocks[3][5:] == [f"{n:,}" for n in plan.kv_len_next_list[:1]]
    assert len(blocks) == 16


def test_what_one_takes_along_runs(page):
    show(page, "#extend=16,8&prefix=8,0&ranks=4&strategy=contiguous")
    command, code = page.locator(".cpx-code").all_inner_texts()
    arguments = [sys.executable, "-m", *shlex.split(command)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert "contiguous over 4 ranks: 2 sequences, 24 new tokens" in done.stdout
    assert "8 cached" in done.stdout
    options = {"cp_size": 4, "strategy": "contiguous"}
    expected = cpattn.build_cp_metadata_all_ranks([16, 8], [24, 8], **options)
    assert eval(code, {"cpattn": cpattn}) == expected


def focused(page):
    """Return the name of the element with the keyboard; its frame must be visible."""
    outline = "const s = getComputedStyle(e); return [s.outlineStyle, parseFloat(s.outlineWidth)]"
    style, width = page.evaluate(f"(() => {{ const e = document.activeElement; {outline} }})()")
    assert style == "solid"
    assert width >= 2
    names = "const e = document.activeElement; return e.name || e.textContent"
    return page.evaluate(f"(() => {{ {names} }})()")


def test_it_works_by_keyboard_alone(page):
    typed = {"extend": "16, 6", "prefix": "100", "ranks": "2", "pageSize": "64"}
    stops = []
    show(page)
    assert status(page) == f"{START} The busiest rank has 1.02 × the mean work."
    while not stops or stops[-1] != "Link to this plan":
        page.keyboard.press("Tab")
        stops.append(focused(page))
        if stops[-1] in typed:
            page.keyboard.press("Control+A")
            page.keyboard.type(typed[stops[-1]])
        if stops[-1] == "prefix":
            wrong = page.get_by_role("alert").filter(has_text="Cached tokens")
            assert wrong.inner_text() == WRONG["prefix=8"]
            page.keyboard.type(", 0")
        if stops[-1] == "strategy":
            page.keyboard.press("End")
        if stops[-1].startswith("Blocks of each rank"):
            page.keyboard.press("Enter")
            assert page.get_by_role("table", name="Blocks").is_visible()
        assert len(stops) < 30, stops
    fields = ["extend", "prefix", "ranks", "strategy", "pageSize", "heads", "headDim", "dtype"]
    assert stops[:8] == fields
    said = status(page)
    assert said.startswith("contiguous over 2 ranks: 2 sequences, 22 new tokens.")
    page.keyboard.press("Enter")
    assert focused(page) == "Link to this plan"
    address = page.evaluate("location.hash")
    assert address.startswith("#extend=16,6&prefix=100,0&ranks=2&strategy=contiguous&pageSize=64&")
    show(page, address)
    assert status(page) == said
    assert page.input_value("[name=extend]") == "16,6"


LENGTH = "each must be a whole number from 0 to 33,554,432"
WRONG = {
    "extend=3.5": f"New tokens: {LENGTH}, got “3.5”.",
    f"extend={','.join('1' * 65)}": "New tokens: at most 64 numbers, got 65.",
    "extend=33554432, 1": "New tokens: with the cached ones at most 33,554,432, got 33,554,441.",
    "prefix=8": "Cached tokens: as many numbers as New tokens has (2), or none, got 1.",
    "ranks=257": "Ranks: must be a whole number from 1 to 256, got “257”.",
    "strategy=spiral": "Strategy: must be one of zigzag, interleave, contiguous, got “spiral”.",
}


@pytest.mark.parametrize("given", WRONG)
def test_bad_input_names_the_field_and_the_rule(page, given):
    field, _, text = given.partition("=")
    show(page, "#" + urlencode({"extend": "24,10", "prefix": "8,0", field: text}))
    found = [said for said in page.locator(".cpx-error").all_inner_texts() if said]
    assert found == [WRONG[given]]
    assert page.locator(".cpx-result").is_hidden()
    assert page.get_attribute(f"[name={field}]", "aria-invalid") == "true"
    assert page.get_attribute(f"[name={field}]", "aria-describedby").endswith(f"{field}-error")
    assert status(page) == "No plan: 1 field to correct."
    if field == "strategy":
        page.select_option(f"[name={field}]", index=1)
    else:
        page.fill("[name=prefix]", "")
        page.fill(f"[name={field}]", {"extend": "5", "prefix": "1, 2"}.get(field, "16"))
    assert page.locator("[aria-invalid]").count() == 0
    assert page.locator(".cpx-result").is_visible()


@pytest.mark.parametrize(
    ("address", "wrong"),
    [
        ("#extend=x" + "y" * 300 + "&ranks=0&strategy=foo", 3),
        (f"#extend={','.join(['30000'] * 64)}&ranks=16&strategy=interleave", 0),
    ],
)
def test_nothing_is_wider_than_400_pixels(page, address, wrong):
    """The page is full here; the tests of the site have it as it begins."""
    page.set_viewport_size({"width": 400, "height": 800})
    show(page, address)
    if page.locator("details").is_visible():
        page.get_by_text("Blocks of each rank").click()
    assert page.evaluate("document.documentElement.scrollWidth") == 400
    assert page.locator("[aria-invalid]").count() == wrong


def test_the_page_of_the_site_has_what_the_page_alone_has():
    alone, site = (PAGE.with_name(name).read_text() for name in ("explorer.html", "index.md"))
    for part in ("explorer.css", "plan.js", "fields.js", "explorer.js", 'id="cpattn-explorer"'):
        assert part in alone
        assert part in site
