"""Which versions of verifiers are refused."""

from importlib.metadata import PackageNotFoundError

import pytest

pytest.importorskip("verifiers", reason="needs verifiers: install the extra of that name")

import renderers.client
import verifiers.v1.graph

from fsref.episodes import seams
from fsref.errors import ConfigError, MissingExtra


@pytest.fixture(autouse=True)
def _forget() -> None:
    seams.check_seams.cache_clear()


def test_the_installed_verifiers_has_every_name() -> None:
    seams.check_seams()


@pytest.mark.parametrize("found", ["0.3.9", "0.4.0", "0.4.0.post1", "0.4.1.dev17", "0.4.1.dev85"])
def test_older_versions_are_refused_with_what_to_install(found: str) -> None:
    with pytest.raises(ConfigError, match=rf"verifiers {found} is installed, at least 0.4.1.dev86 is needed.*pip install --pre"):
        seams.check_version(found)


@pytest.mark.parametrize(
    "found", ["0.4.1.dev86", "0.4.1.dev87", "0.4.1.dev86+local", "0.4.1a1", "0.4.1rc1", "0.4.1", "0.4.2.dev1", "0.5.0"]
)
def test_that_version_and_newer_ones_are_taken(found: str) -> None:
    seams.check_version(found)


def test_something_that_is_no_version_is_refused() -> None:
    with pytest.raises(ConfigError, match="calls itself 'unknown'"):
        seams.check_version("unknown")


def test_without_verifiers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> str:
        raise PackageNotFoundError

    monkeypatch.setattr(seams, "version", missing)
    with pytest.raises(MissingExtra, match=r"fsref\[verifiers\]"):
        seams.check_seams()


def test_a_function_that_lost_a_parameter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def generate(*, client: object, model: str, prompt_ids: object, sampling_params: object) -> None: ...

    monkeypatch.setattr(renderers.client, "generate", generate)
    with pytest.raises(ConfigError, match=r"these names changed: renderers.client.generate takes no extra_headers\. Install"):
        seams.check_seams()


def test_a_name_and_a_field_that_are_gone_are_both_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(renderers.client, "generate")
    monkeypatch.delitem(verifiers.v1.graph.MessageNode.model_fields, "top_logprobs")
    with pytest.raises(ConfigError, match=r"generate is gone; verifiers.v1.graph.MessageNode has no field top_logprobs"):
        seams.check_seams()
