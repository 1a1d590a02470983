# SPDX-License-Identifier: Apache-2.0
"""The package has the imports, versions, exports of stubs and documents that users expect."""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
from pathlib import Path

import check_release
import numpy as np
import pytest

import cpattn
import cpattn_lab
import cpattn_proof
import cpattn_terminal
from cpattn_lab import cost_model, traffic
from support import cases
from support.places import ROOT
from support.public_names import PUBLIC_MODULES
from support.tolerances import assert_logits_close

DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])

NEW_MODULES = """
import sys, numpy
before = set(sys.modules)
import cpattn
new = {name.split(".")[0] for name in set(sys.modules) - before}
print(*sorted(new - set(sys.stdlib_module_names)))
"""


def test_import_brings_nothing_but_numpy(children):
    assert children.python(NEW_MODULES).stdout.split() == ["cpattn"]


def test_one_version_everywhere_and_one_package_in_the_wheel():
    def first(pattern, path):
        return re.search(pattern, (ROOT / path).read_text(), re.MULTILINE)[1]

    assert first(r'^version = "(.+)"', "pyproject.toml") == cpattn.__version__
    for pattern, file in check_release.PLACES:
        assert first(pattern, file) == cpattn.__version__
    assert first(r"^wheel\.packages = (.+)", "pyproject.toml") == '["python/cpattn"]'


PROOF_ALONE = """
import shutil, sys
for hidden in ("cpattn", "fcntl", "grp", "posix", "pwd", "resource", "termios"):
    sys.modules[hidden] = None
import cpattn_proof, cpattn_proof.zoo, cpattn_terminal.main
rows = {"request": [0], "position": [0], "count": [1]}
plan = {"requests": [{"prefix": 0, "extend": 1}], "ranks": [{"rows": rows}]}
assert cpattn_proof.lint({"schema": "cpattn-plan/1", **plan}).proved
new = {name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)
print(*sorted(new & {"cpattn", "click", "jinja2", "hypothesis", "rich", "torch"}))
"""


PROOF_ANYWHERE = (
    "import hypothesis, rich, torch.testing, torch.utils._python_dispatch, torch.distributed\n"
    + PROOF_ALONE.partition("import cpattn_proof,")[0]
    + """
import importlib, pkgutil, cpattn_proof
for module in pkgutil.walk_packages(cpattn_proof.__path__, "cpattn_proof."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        print(module.name, error.name)
"""
)


def test_no_module_of_proof_needs_linux(children):
    missing = [line.split()[1] for line in children.python(PROOF_ANYWHERE).stdout.splitlines()]
    assert {name.partition(".")[0] for name in missing} == {"cpattn"}  # for which some need it


def test_lint_needs_neither_the_library_nor_linux(children):
    printed = children.python(PROOF_ALONE).stdout
    assert printed.split() == ["cpattn"]  # all others are hidden


def source_of(name: str) -> str:
    return Path(importlib.util.find_spec(name).origin).read_text()


def num_examples(source: str) -> int:
    return len(re.findall(r"^ *>>> ", source, re.MULTILINE))


MODULES = [
    module.name
    for package in (cpattn, cpattn_lab, cpattn_proof, cpattn_terminal)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if not module.name.endswith("._core") and num_examples(source_of(module.name))
]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name):
    """All examples of the sources run, also of classes that name a package around them."""
    module, source, finder = importlib.import_module(name), source_of(name), doctest.DocTestFinder()
    tests = finder.find(module)
    for kind in vars(module).values():
        if inspect.isclass(kind) and name.startswith(f"{kind.__module__}."):
            tests += finder.find(kind, module=False, globs=vars(module))
    tests = [x for x in tests if x.examples and x.examples[0].source.splitlines()[0] in source]
    tests = list({test.docstring: test for test in tests}.values())  # methods may be functions
    assert sum(len(test.examples) for test in tests) == num_examples(source)
    runner = doctest.DocTestRunner()
    for test in tests:
        runner.run(test)
    assert runner.summarize().failed == 0


def anchors(document: Path) -> set[str]:
    """Return the anchors that GitHub makes from the headings."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere():
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
            if target.startswith(("http://", "https://")):
                continue
            path, _, anchor = target.partition("#")
            file = document.parent / path if path else document
            assert file.exists(), (document, target)
            assert not anchor or anchor in anchors(file), (document, target)


def blocks_of(name: str, language: str) -> list[str]:
    text = (ROOT / name).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


EXAMPLE = re.compile(
    r'^```python\n(.*?)^```$(?:\n\n```text(?: title="Output")?\n(.*?)^```$)?', re.M | re.S
)
#: Documents whose examples need the engine that they are about.
OF_ENGINES = {"integrations", "sglang", "sglang_ascend", "vllm"}
OF_TRANSFORMERS = {"around_transformers", "context_parallel_models", "transformers"}


# PEFT 0.21 asks transformers 5.23 for a property by its former name.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            str(path.relative_to(ROOT)),
            marks=pytest.mark.slow if path.stem in OF_TRANSFORMERS else (),  # a slow import
        )
        for path in DOCUMENTS
        if path.stem not in OF_ENGINES and "```python\n" in path.read_text()
    ],
)
def test_examples_of_documents_print_what_these_show(name, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    try:
        for example, shown in EXAMPLE.findall((ROOT / name).read_text()):
            if name == "README.md":
                assert shown
                names = {}  # each alone, as a reader copies it
            exec(compile(example, name, "exec"), names)
            printed = capsys.readouterr().out
            assert not shown or printed == shown
    finally:
        sys.modules.pop("torch_npu", None)  # one example installs it for good


@pytest.mark.slow  # an import of transformers
def test_the_model_of_the_readme(tmp_path):
    import torch
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 50}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).save_pretrained(
        tmp_path
    )
    load = transformers.AutoModelForCausalLM
    names = {"AutoModelForCausalLM": load, "folder": tmp_path}
    block, over_ranks = blocks_of("README.md", "py")
    exec(block, names)
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        expected = load.from_pretrained(tmp_path, attn_implementation="eager")(tokens).logits
        assert_logits_close(names["model"](tokens).logits, expected)
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        exec(over_ranks, names | {"prompts": [[1, 2, 3], [4]], "model": names["model"].eval()})
    finally:
        torch.distributed.destroy_process_group()


def test_blocks_with_names_of_the_reader_are_run_here():
    """Blocks in "py" have names that come from elsewhere."""
    named = {path.name for path in DOCUMENTS if "```py\n" in path.read_text()}
    assert named == {"README.md", "deployment.md", "kv_transfer.md"}


def test_the_ranks_of_the_document_on_deployment(request):
    """One rank of gloo has the names of the reader, and the block computes right attention."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    request.addfinalizer(dist.destroy_process_group)
    names = {
        "ContextParallel": cpattn.distributed.ContextParallel,
        "group": dist.group.WORLD,
        "extend_lens": [200, 14],
        "seq_lens": [200, 14],
        "block_tables": [[3, 1], [2, -1]],
        "hidden": torch.randn(214, 8),
        "positions": torch.cat([torch.arange(200), torch.arange(14)]),
        "q": torch.randn(214, 4, 32),
    }
    names |= {name: torch.randn(214, 2, 32) for name in ("k", "v")}
    names |= {name: torch.full((4 * 128, 2, 32), torch.nan) for name in ("k_cache", "v_cache")}
    before = dict(names)
    block, _, shared = blocks_of("docs/how_to/deployment.md", "py")  # kv/test_numa_memory.py runs _
    exec(block, names)
    assert torch.equal(names["hidden"], before["hidden"])
    slots = torch.cat([3 * 128 + torch.arange(128), 128 + torch.arange(72), 256 + torch.arange(14)])
    q, k, v, out = (
        names["cp"].gather(names["plan"], names[name]) for name in ("q", "k", "v", "out")
    )
    assert torch.equal(names["k_cache"][slots], k)
    assert torch.equal(names["v_cache"][slots], v)
    inputs = {name: names[name] for name in ("k_cache", "v_cache", "block_tables")}
    inputs |= {"q": q, "q_lens": [200, 14], "kv_lens": [200, 14], "page_size": 128}
    cases.assert_attention(out, None, inputs)

    names |= {"MHATokenToKVPool": cpattn.kv.MHATokenToKVPool, "layer": 1}
    names |= {"num_slots": 3 * 128, "num_layers": 2, "num_kv_heads": 2, "head_dim": 32}
    whole = names["out"]
    exec(shared, names)
    assert names["cp"].topology().transport == "shm"
    assert torch.equal(names["out"], whole)


def test_the_servers_of_the_document_on_kv_transfer():
    """Source and target are in this process, and so is their engine."""
    source, target = (
        cpattn.kv.MHATokenToKVPool(size=64, page_size=16, num_layers=2, num_kv_heads=2, head_dim=32)
        for _ in range(2)
    )
    layout = cpattn.transfer.KVLayout.from_pool(target)
    plan = cpattn.transfer.plan_kv_transfer(
        cpattn.transfer.KVLayout.from_pool(source), layout, [1, 2], [3, 0]
    )
    source.set_kv_buffer(1, [16, 40], *np.random.default_rng(0).random((2, 2, 2, 32), np.float32))

    def both_sides(host):
        engine = cpattn.transfer.LocalEngine()
        cpattn.transfer.register(engine, source)
        return engine

    names = {"cpattn": cpattn, "MooncakeEngine": both_sides, "host": "127.0.0.1"}
    names |= {"pool": target, "layout": layout, "plan": plan}
    (block,) = blocks_of("docs/how_to/kv_transfer.md", "py")
    exec(block, names)
    assert cpattn.transfer.KVLayout.from_dict(names["message"]["layout"]) == layout
    for ours, theirs in zip(source.get_kv_buffer(1), target.get_kv_buffer(1), strict=True):
        assert (theirs[3] == ours[1]).all()
        assert (theirs[0] == ours[2]).all()
        assert (ours[1] != 0).any()


def test_documents_install_cpattn_from_its_folder():
    """No index has cpattn: its name can only bring extras of one that is installed."""
    texts = [*DOCUMENTS, *(ROOT / "python").rglob("*.py"), *(ROOT / "notebooks").glob("*.ipynb")]
    commands = [
        (path.name, re.split(r" #| in the folder", command)[0])
        for path in texts
        for command in re.findall(r"pip install ([^\n]*)", path.read_text(encoding="utf-8"))
    ]
    assert ("sglang.md", "sglang==0.5.23") in commands
    assert not [command for command in commands if "cpattn" in command[1].split()]


SUB_PACKAGES = {
    "captures", "context_parallel", "distributed", "integrations", "kv", "npu", "profiling",
    "scheduling", "sparse", "torch_guard", "transfer",
}  # fmt: skip


def test_the_public_face_is_small():
    assert set(dir(cpattn)) == {*cpattn.__all__, *SUB_PACKAGES}
    assert len(cpattn.__all__) == len(set(cpattn.__all__)) <= 23
    assert not SUB_PACKAGES & set(cpattn.__all__)  # `import *` brings no torch
    (block,) = (  # only type checkers see it
        node
        for node in ast.parse(source_of("cpattn")).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    seen = [ast.unparse(line) for line in block.body]
    assert seen == [f"from . import {name} as {name}" for name in sorted(SUB_PACKAGES)]


def test_sub_packages_come_when_they_are_asked_for(children):
    code = f"""
import sys, cpattn
early = {{"context_parallel", "profiling", "sparse"}}  # whose names are in `cpattn`, too
loaded = {{name.removeprefix("cpattn.") for name in sys.modules}}
assert loaded & {SUB_PACKAGES} == early, loaded
for name in {SUB_PACKAGES}:
    assert getattr(cpattn, name) is sys.modules[f"cpattn.{{name}}"]
"""
    children.python(code)


@pytest.mark.parametrize(("package", "name"), [("cpattn", "captures"), ("cpattn_proof", "lint")])
def test_what_cannot_be_imported_says_why(package, name, monkeypatch):
    """An import statement turns an AttributeError within it into "cannot import name"."""

    def fail(*_):
        raise AttributeError("module 'torch' has no attribute '_x'")

    module = importlib.import_module(package)
    monkeypatch.setattr(module, "import_module", fail)
    monkeypatch.delitem(vars(module), name, raising=False)
    monkeypatch.delitem(sys.modules, f"{package}.{name}", raising=False)
    message = rf"^{package}\.{name} cannot be imported: module 'torch' has no attribute '_x'$"
    with pytest.raises(ImportError, match=message):
        exec(f"from {package} import {name}")


def test_what_functions_return_is_where_they_are():
    modules = (
        *PUBLIC_MODULES, cpattn.context_parallel, cost_model, cpattn.distributed, cpattn.scheduling,
        traffic,
    )  # fmt: skip
    for module in modules:
        package = importlib.import_module(re.sub(r"\.(sglang|vllm)(_\d+)+$", "", module.__name__))
        for name in module.__all__:
            function = getattr(module, name)
            if not inspect.isfunction(function):
                continue
            for word in re.findall(r"\w+", str(inspect.signature(function).return_annotation)):
                kind = function.__globals__.get(word, getattr(cpattn._core, word, None))
                if inspect.isclass(kind) and kind.__module__.startswith("cpattn"):
                    assert word in {*module.__all__, *package.__all__}, (name, word)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"^module 'cpattn' has no attribute 'nonsense'$"):
        cpattn.nonsense  # noqa: B018
