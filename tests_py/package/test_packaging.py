# SPDX-License-Identifier: Apache-2.0
"""The image, the conda recipe, the citation and the forms, read as the tools that take them would.

No daemon builds the image here, and no conda the recipe.
"""

from __future__ import annotations

import json
import re
import shlex

import jinja2
import pytest
import yaml
from requirements import tomllib

from support.command_line import invoke
from support.places import ROOT

PACKAGING = ROOT / "scripts" / "packaging"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def instructions():
    """Lines of the Dockerfile, continued ones joined, as an instruction and the rest."""
    text = (PACKAGING / "Dockerfile").read_text()
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    return [tuple(line.split(None, 1)) for line in text.splitlines() if line.strip()]


def test_stages_of_the_image():
    stages, copied = [], []
    for name, rest in instructions():
        assert name in {"FROM", "RUN", "COPY", "USER", "WORKDIR", "CMD"}
        if name == "FROM":
            stages.append(rest.partition(" AS ")[2])
        elif name == "COPY" and rest.startswith("--from="):
            copied.append(rest.split()[0].removeprefix("--from="))
            assert copied[-1] in stages[:-1]
    assert (stages, copied) == (["build", ""], ["build"])


def test_what_the_image_installs():
    runs = [rest for name, rest in instructions() if name == "RUN"]
    (wheels,) = (rest for rest in runs if rest.startswith("pip wheel"))
    sources = [word for word in shlex.split(wheels) if word.startswith("/source")]
    for source in sources:
        assert (ROOT / source.removeprefix("/source").lstrip("/") / "pyproject.toml").exists()
    assert len(sources) == 3
    assert any(f"torch=={version}" in rest for rest in runs for version in torch_of_make())


def torch_of_make():
    return re.findall(r"^TORCH \?= torch==(\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_the_command_of_the_image():
    ((_, command),) = (x for x in instructions() if x[0] == "CMD")
    shell, option, script = json.loads(command)
    assert (shell, option) == ("sh", "-c")
    for call in script.split(" && "):
        program, subcommand, *options = call.split()
        assert program == "cpattn"
        shown = invoke(subcommand, "--help")
        assert shown.exit_code == 0
        assert all(name in shown.stdout for name in options)


def test_the_conda_recipe():
    folder = PACKAGING / "conda"

    def load_file_data(name, *, from_recipe_dir):
        assert from_recipe_dir
        return tomllib.loads((folder / name).read_text())

    names = {"load_file_data": load_file_data, "PYTHON": "python"}
    names |= {"compiler": "{}_compiler".format, "stdlib": "{}_stdlib".format}
    template = jinja2.Environment(autoescape=True).from_string((folder / "meta.yaml").read_text())
    recipe = yaml.safe_load(template.render(**names))
    project = PYPROJECT["project"]
    assert recipe["package"] == {"name": "cpattn", "version": project["version"]}
    assert (folder / recipe["source"]["path"]).resolve() == ROOT
    # PyPI's requirements, but for how Eigen is called.
    host = {line.replace(" ", "") for line in recipe["requirements"]["host"]}
    wanted = {x.replace("cmeel-eigen", "eigen") for x in PYPROJECT["build-system"]["requires"]}
    assert wanted <= host
    run = {line.replace(" ", "") for line in recipe["requirements"]["run"]}
    assert run == {"python", *project["dependencies"]}
    for file in (*recipe["test"]["source_files"], recipe["about"]["license_file"]):
        assert (ROOT / file).is_file()
    assert recipe["test"]["commands"][0].split()[1] in recipe["test"]["source_files"]


def test_the_citation():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)  # its schema needs them
    assert citation["version"] == PYPROJECT["project"]["version"]
    assert citation["license"] == PYPROJECT["project"]["license"]
    assert citation["authors"] == PYPROJECT["project"]["authors"]


@pytest.mark.parametrize("name", ["bug", "request"])
def test_forms_of_issues(name):
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text())
    assert {"name", "description", "body"} <= set(form)
    identifiers = [field["id"] for field in form["body"]]
    assert len(set(identifiers)) == len(identifiers)
    for field in form["body"]:
        assert field["type"] == "textarea"
        assert field["attributes"]["label"]


def test_what_the_form_of_changes_links_to():
    text = (ROOT / ".github" / "PULL_REQUEST_TEMPLATE.md").read_text()
    for link in re.findall(r"\]\((.+?)\)", text):
        file, _, anchor = link.partition("#")
        headings = (ROOT / ".github" / file).read_text().lower().replace(" ", "-")
        assert f"#-{anchor}\n" in headings
