"""The command line, environment and checks of a real vLLM, without one."""

from pathlib import Path
from typing import Any

import pytest

from fsref import config as settings
from fsref.errors import ConfigError, MissingExtra
from fsref.inference.external import Installed, arguments, check, environment, find_vllm, installed_from

CPU = Installed(version="0.27.1", cpu=True, plugins=("cpu_capture",))
GPU = Installed(version="0.32.0", cpu=False, plugins=())


def config(**over: Any) -> settings.Config:
    data: dict[str, Any] = {
        "run": {"id": "r", "seed": 5, "fields": ["routed_experts", "top_logprobs"]},
        "model": {"path": "/models/tiny"},
        "sampling": {"top_k": -1},
        "inference": {"kind": "vllm", "context_max": 512, "concurrent_max": 16},
    }
    for section, values in over.items():
        data[section] = {**data.get(section, {}), **values}
    return settings.build(data)


def argv(cfg: settings.Config, installed: Installed = CPU) -> list[str]:
    return arguments(cfg, installed, host="127.0.0.1", port=8000, logprobs_max=20)


def test_the_command_line_asks_for_what_the_run_needs() -> None:
    assert argv(config()) == [
        *("-m", "vllm.entrypoints.openai.api_server", "--model", "/models/tiny", "--served-model-name", "policy"),
        *("--host", "127.0.0.1", "--port", "8000", "--seed", "5", "--dtype", "bfloat16"),
        *("--max-model-len", "512", "--max-num-seqs", "16"),
        *("--max-logprobs", "20", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
        *("--enable-return-routed-experts", "--enforce-eager"),
    ]


def test_masks_are_asked_for_where_the_run_has_the_field() -> None:
    wanted = config(run={"fields": ["routed_experts", "sampling_mask"]})
    check(wanted, GPU)
    assert "--return-sampling-mask" in argv(wanted, GPU)
    assert "--enforce-eager" not in argv(wanted, GPU)


def test_a_run_without_routing_does_not_ask_for_it() -> None:
    assert "--enable-return-routed-experts" not in argv(config(run={"fields": ["top_logprobs"]}))


def test_own_arguments_come_last_and_own_variables_win() -> None:
    cfg = config(inference={"args": ["--max-num-seqs", "4"], "env": {"OMP_NUM_THREADS": "7"}})
    assert argv(cfg)[-2:] == ["--max-num-seqs", "4"]
    env = environment(cfg, CPU, {"PATH": "/bin", "VLLM_CPU_KVCACHE_SPACE": "4"})
    assert env["VLLM_SERVER_DEV_MODE"] == "1"
    assert (env["PATH"], env["VLLM_CPU_KVCACHE_SPACE"], env["OMP_NUM_THREADS"]) == ("/bin", "4", "7")
    assert "VLLM_CPU_KVCACHE_SPACE" not in environment(config(), GPU, {})


@pytest.mark.parametrize(
    ("installed", "over", "word"),
    [
        (Installed("0.25.0", True, ("cpu_capture",)), {}, r"0\.25\.0 is installed"),
        (Installed("0.270", True, ("cpu_capture",)), {}, r"0\.270 is installed"),
        (Installed("0.27.1", True, ()), {}, "capture plugin"),
        (Installed("0.32.0", True, ("cpu_capture",)), {}, r"0\.27\.1 can"),
        (CPU, {"run": {"fields": ["sampling_mask"]}}, "cannot return: drop it"),
        (Installed("0.27.1", False, ()), {"run": {"fields": ["sampling_mask"]}}, "cannot return: drop it"),
        (CPU, {"sampling": {"top_k": 20}}, "sets that the trainer cannot know"),
        (CPU, {"sampling": {"top_p": 0.9}}, "sets that the trainer cannot know"),
        (CPU, {"sampling": {"min_p": 0.1}}, "sets that the trainer cannot know"),
    ],
)
def test_a_vllm_that_cannot_return_what_the_run_needs_is_refused(installed: Installed, over: Any, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        check(config(**over), installed)


def test_the_tested_ones_pass() -> None:
    check(config(), CPU)
    check(config(), GPU)
    check(config(run={"fields": ["top_logprobs"]}), Installed("0.27.1", True, ()))


def test_cpu_builds_are_known_by_their_name_or_their_local_version() -> None:
    assert installed_from({"vllm-cpu": "0.27.1"}, []).cpu
    assert installed_from({"vllm": "0.27.1+cpu"}, []).cpu
    assert not installed_from({"vllm": "0.32.0"}, []).cpu
    with pytest.raises(MissingExtra, match=r"fsref\[vllm\]"):
        installed_from({}, [])


def test_an_interpreter_that_does_not_run_is_named() -> None:
    with pytest.raises(ConfigError, match="/no/such/python"):
        find_vllm("/no/such/python", {})
    with pytest.raises(ConfigError, match="does not run"):
        find_vllm("/bin/false", {})


def test_the_interpreter_is_asked_in_the_environment_that_it_will_run_in(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("""#!/bin/sh\necho '{"versions": {"vllm-cpu": "'$VERSION'"}, "plugins": ["cpu_capture", "other"]}'\n""")
    python.chmod(0o755)
    assert find_vllm(str(python), {"VERSION": "0.27.1"}) == Installed("0.27.1", True, ("cpu_capture", "other"))
