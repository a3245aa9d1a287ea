"""A real vLLM in this process's place: its command line, its environment, and the checks that come before."""

from typing import NoReturn

from fsref.config import Config


def exec_vllm(config: Config, *, host: str, port: int, logprobs_max: int) -> NoReturn:
    raise NotImplementedError
