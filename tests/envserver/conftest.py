"""One engine and one run for the session; replicas start when a test first needs them and are shared where a test leaves them whole."""

from collections.abc import Callable, Iterator

import pytest

from tests.envserver.engine import Engine
from tests.envserver.support import Replica, Run, make_run, source

pytest.importorskip("verifiers", reason="needs verifiers: install the extra of that name")

ONE_RETRY = {"rules": [{"type": "ProviderError", "max_retries": 1}]}
"""After an engine's failure, and no other."""

SEAT = {"harness": {"id": "tests_envserver_tasks"}, "runtime": {"type": "subprocess"}}

ENVS = (
    source("lone", env_args={"agent": {"retries": ONE_RETRY}}),
    source("pool", workers=2, env_args={"retries": ONE_RETRY}),
    source("twoagents", env_id="tests.envserver.two_agents", env_args={"solver": SEAT, "judge": SEAT}),
    source("brief"),
    source("briefpool", workers=2),
    source("pair", replicas=2),
)


@pytest.fixture(scope="session")
def session_engine() -> Iterator[Engine]:
    with Engine() as engine:
        yield engine


@pytest.fixture
def engine(session_engine: Engine) -> Iterator[Engine]:
    """The session's engine, without faults."""
    session_engine.requests.clear()
    yield session_engine
    session_engine.failures_left = 0
    session_engine.drop.clear()
    session_engine.damage.clear()
    session_engine.ends_early = True


@pytest.fixture(scope="session")
def run(session_engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    run = make_run(tmp_path_factory.mktemp("envserver"), session_engine, envs=ENVS)
    yield run
    run.stop()


@pytest.fixture(scope="session")
def shared(run: Run) -> Callable[[str], Replica]:
    """The shared replica of a source; started once."""
    started: dict[str, Replica] = {}

    def get(env: str) -> Replica:
        if env not in started or started[env].process.poll() is not None:
            started[env] = run.start(env)
        return started[env]

    return get


@pytest.fixture(params=["lone", "pool"])
def replica(request: pytest.FixtureRequest, shared: Callable[[str], Replica], engine: Engine) -> Iterator[Replica]:
    """The shared replica with one worker, then the one with a broker and two workers."""
    del engine
    found = shared(request.param)
    yield found
    found.clear("hold-put", "in-put", "fail-put", "hold-flush", "in-flush", "break-reply")
