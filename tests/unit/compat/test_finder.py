"""The finder: one module under two names, metadata that says who provides it, and a way back."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import io
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

import shoal
from shoal.compat import about, environment, finder
from shoal.compat.engine import DeepSpeedEngine
from shoal.errors import UsageError

ROOT = Path(shoal.__file__).resolve().parent.parent
VERSION = f"0.19.8+shoal.{shoal.__version__}"


@pytest.fixture
def deepspeed_alias() -> Iterator[None]:
    finder.install(children=False)
    yield
    finder.uninstall()


def run(code: str, **variables: str) -> Any:
    """What a new interpreter prints as JSON on its last line."""
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.usefixtures("deepspeed_alias")
def test_both_names_are_one_module_and_one_class() -> None:
    import deepspeed
    import deepspeed.runtime.engine

    import shoal.compat.deepspeed.runtime.engine as ours

    assert deepspeed is shoal.compat.deepspeed
    assert deepspeed.runtime.engine is ours
    assert deepspeed.DeepSpeedEngine is deepspeed.runtime.engine.DeepSpeedEngine is DeepSpeedEngine


@pytest.mark.usefixtures("deepspeed_alias")
def test_a_function_keeps_its_place_beside_a_module_of_its_name() -> None:
    import deepspeed.utils

    module = importlib.import_module("deepspeed.utils.z3_leaf_module")

    assert callable(deepspeed.utils.z3_leaf_module) and not callable(module)
    assert module is sys.modules["shoal.compat.deepspeed.utils.z3_leaf_module"]


@pytest.mark.usefixtures("deepspeed_alias")
def test_the_specification_and_the_metadata_are_found_as_clients_look_for_them() -> None:
    before = importlib.util.find_spec("deepspeed")
    assert before is not None and before.name == "deepspeed"
    import deepspeed

    after = importlib.util.find_spec("deepspeed")
    assert after is not None and after.name == "shoal.compat.deepspeed"
    assert importlib.metadata.version("deepspeed") == deepspeed.__version__ == VERSION
    found = importlib.metadata.metadata("deepspeed")
    assert (found["Name"], found["Summary"]) == ("deepspeed", "provided by Shoal, not by DeepSpeed")
    assert "deepspeed" in importlib.metadata.packages_distributions()["deepspeed"]


@pytest.mark.usefixtures("deepspeed_alias")
def test_the_version_passes_the_bounds_that_clients_set() -> None:
    from packaging.specifiers import SpecifierSet

    for bound in (">=0.9.3", ">=0.16.0", ">=0.18.2", "<=0.19.8", "<0.20"):
        assert VERSION in SpecifierSet(bound)


@pytest.mark.usefixtures("deepspeed_alias")
def test_a_pickle_that_names_deepspeeds_engine_resolves_to_ours() -> None:
    text = b"cdeepspeed.runtime.engine\nDeepSpeedEngine\n."
    assert pickle.load(io.BytesIO(text)) is DeepSpeedEngine  # noqa: S301 - the bytes are the line above


def test_nothing_is_lent_before_and_after() -> None:
    names = {name for name in sys.modules if name.partition(".")[0] == "deepspeed"}
    assert names == set() and importlib.util.find_spec("deepspeed") is None
    variables = dict(os.environ)
    finder.install()
    assert os.environ["SHOAL_AS_DEEPSPEED"] == "1"
    import deepspeed

    assert deepspeed.__name__ == "shoal.compat.deepspeed"
    finder.uninstall()
    assert dict(os.environ) == variables
    assert importlib.util.find_spec("deepspeed") is None
    assert not any(name.partition(".")[0] == "deepspeed" for name in sys.modules)
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("deepspeed")


def test_a_second_install_changes_nothing() -> None:
    finder.install(children=False)
    finders = list(sys.meta_path)
    finder.install(children=False)
    assert sys.meta_path == finders
    finder.uninstall()
    finder.uninstall()


def test_a_deepspeed_that_is_imported_already_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ModuleType("deepspeed")
    real.__file__ = "/somewhere/deepspeed/__init__.py"
    monkeypatch.setitem(sys.modules, "deepspeed", real)
    with pytest.raises(UsageError, match=r"\[as-deepspeed-late\] .* from /somewhere/deepspeed(.|\n)*first line"):
        finder.install()
    assert not finder.is_installed() and "SHOAL_AS_DEEPSPEED" not in os.environ


def test_a_child_process_follows_and_a_sitecustomize_that_was_there_runs_too(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.other_one_ran = True\n")
    found = run(
        "import shoal.compat.finder as f, subprocess, sys; f.install(); subprocess.run([sys.executable, '-c', "
        "'import deepspeed, json, sys; print(json.dumps([deepspeed.__version__, sys.other_one_ran]))'], check=True)",
        PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}",
    )
    assert found == [VERSION, True]


def test_a_spawned_process_and_a_fork_server_follow(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import json, multiprocessing\n"
        "def version():\n    import deepspeed\n    return deepspeed.__version__\n"
        "if __name__ == '__main__':\n"
        "    found = []\n"
        "    for method in ('spawn', 'forkserver'):\n"
        "        with multiprocessing.get_context(method).Pool(1) as pool:\n"
        "            found.append(pool.apply(version))\n"
        "    print(json.dumps(found))\n"
    )
    code = f"import sys; sys.argv = ['x', {str(script)!r}]; from shoal.compat.deepspeed.__main__ import main; main()"
    assert run(code) == [VERSION, VERSION]


def test_a_module_below_the_alias_runs_as_a_program() -> None:
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "shoal.compat.deepspeed", "-m", "deepspeed.utils.zero_to_fp32", "--help"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0 and "checkpoint_dir" in done.stdout, done.stderr


def test_an_interpreter_without_the_variable_has_no_alias() -> None:
    code = "import importlib.util, json; print(json.dumps(importlib.util.find_spec('deepspeed') is None))"
    path = f"{environment.STARTUP}{os.pathsep}{ROOT}"
    assert run(code, PYTHONPATH=path) is True
    assert run(code, PYTHONPATH=path, SHOAL_AS_DEEPSPEED="0") is True
    assert run(code, PYTHONPATH=path, SHOAL_AS_DEEPSPEED="1") is False


def test_a_start_with_the_alias_does_not_import_torch() -> None:
    code = (
        "import importlib.util, json, sys; importlib.util.find_spec('deepspeed');"
        "print(json.dumps('torch' in sys.modules))"
    )
    assert run(code, PYTHONPATH=f"{environment.STARTUP}{os.pathsep}{ROOT}", SHOAL_AS_DEEPSPEED="1") is False


def test_the_import_compiles_nothing_and_starts_no_process() -> None:
    code = (
        "import json, subprocess, sys\n"
        "def refuse(*args, **kwargs): raise AssertionError(args)\n"
        "import torch\n"
        "subprocess.Popen.__init__ = refuse\n"
        "import shoal.compat.deepspeed; shoal.compat.deepspeed.install(); import deepspeed\n"
        "print(json.dumps(sorted({'torch._dynamo', 'torch._inductor', 'triton'} & set(sys.modules))))"
    )
    assert run(code) == []


def test_the_line_in_a_pth_file_installs_the_alias_where_the_variable_is_set(tmp_path: Path) -> None:
    from shoal.cli.as_deepspeed import PTH_LINE

    (tmp_path / "some.pth").write_text(PTH_LINE)
    code = (
        f"import site; site.addsitedir({str(tmp_path)!r}); import importlib.util, json; "
        "print(json.dumps(importlib.util.find_spec('deepspeed') is not None))"
    )
    assert run(code) is False
    assert run(code, SHOAL_AS_DEEPSPEED="1") is True


def test_the_pth_file_is_written_and_removed_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.cli.app import app

    monkeypatch.setattr("sysconfig.get_paths", lambda: {"purelib": str(tmp_path)})
    path = tmp_path / "shoal-as-deepspeed.pth"

    def said(*options: str) -> str:
        return " ".join(CliRunner().invoke(app, ["as-deepspeed", *options]).output.split())

    assert said().startswith("not enabled in this environment")
    assert said("--enable").startswith("wrote") and path.read_text().startswith("import os;")
    assert said().startswith("enabled in this environment")
    assert said("--disable").startswith("removed") and not path.exists()
    assert said("--disable").startswith("nothing to remove")


def test_children_get_the_variables_and_keep_their_path() -> None:
    assert environment.for_children({"PYTHONPATH": "/a"}) == {
        "SHOAL_AS_DEEPSPEED": "1",
        "PYTHONPATH": f"{environment.STARTUP}{os.pathsep}/a",
    }
    assert environment.for_children(environment.for_children({})) == environment.for_children({})


def test_deepspeeds_commands_are_on_the_path_where_the_name_is_shoals() -> None:
    code = (
        "import os, shutil, subprocess, sys\n"
        "import shoal.compat.deepspeed as shoal_as\n"
        "before = os.environ['PATH']\n"
        "shoal_as.install()\n"
        "print([shutil.which(name) is not None for name in ('deepspeed', 'ds', 'ds_report')])\n"
        "asked = subprocess.run(['deepspeed', '--help'], capture_output=True, text=True)\n"
        "print(asked.returncode, '--hostfile' in asked.stdout)\n"
        "shoal_as.uninstall()\n"
        "print(os.environ['PATH'] == before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[True, True, True]", "0 True", "True"]


def test_a_client_of_another_release_is_named_with_the_tested_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", ModuleType("accelerate"))
    monkeypatch.setattr(about, "version_of", lambda name: "1.99.0")
    assert about.untested() == ["accelerate 1.99.0 is outside of the tested range, 1.15.*: differences are possible."]
    monkeypatch.setattr(about, "version_of", lambda name: "1.15.3")
    assert about.untested() == []


def test_the_first_rank_says_once_who_provides_the_name() -> None:
    code = (
        "import contextlib, io, json, logging\n"
        "import shoal.compat.finder as f; f.install(children=False)\n"
        "text = io.StringIO()\n"
        "with contextlib.redirect_stderr(text):\n"
        "    import deepspeed, deepspeed.runtime.engine\n"
        "print(json.dumps(text.getvalue()))"
    )
    assert run(code) == f"shoal: `deepspeed` is Shoal here, version {VERSION}.\n"
    assert run(code, RANK="1", LOCAL_RANK="1") == ""
