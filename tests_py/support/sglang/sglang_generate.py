# SPDX-License-Identifier: Apache-2.0
"""Runs sglang engines one after the other: RUNS is JSON, a list of {"engine": arguments of Engine,
"rounds": lists of prompts for one call each, "sampling"}; RESULTS gets the answers."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from cpattn.integrations.sglang import cpu_engine
from support.sglang.sglang_models import leave_nothing

cpu_engine.install()  # the processes that sglang starts do this, too


def generate(run: dict[str, Any]) -> dict[str, Any]:
    from sglang.srt.entrypoints.engine import Engine

    options = {"device": "cpu", "skip_tokenizer_init": True, "max_total_tokens": 4096}
    options |= {"random_seed": 0, "log_level": "info"}
    engine = Engine(**options, **run["engine"])
    with engine:
        asked = {"sampling_params": run["sampling"]}
        rounds = [engine.generate(input_ids=prompts, **asked) for prompts in run["rounds"]]
        leave_nothing(os.getpid())
    return {
        "tokens": [[answer["output_ids"] for answer in answers] for answers in rounds],
        "num_cached": [[x["meta_info"]["cached_tokens"] for x in answers] for answers in rounds],
    }


if __name__ == "__main__":
    runs = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps([generate(run) for run in runs]))
