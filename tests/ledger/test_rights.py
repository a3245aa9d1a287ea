"""The legal moves of a live holder."""

import pytest

from fsref.errors import DoubleDrop, NotHolder, StepError, StepReleased
from fsref.ledger.rights import ConsumerRights, EnvRights, StepRights

E = "env.a.0000000000000001"


def kept(*, strict: bool = False, count: int = 3) -> EnvRights:
    rights = EnvRights(E, strict=strict)
    for _ in range(count):
        rights.keep(rights.mint(), byte_count=10)
    return rights


def ids(*seqs: int) -> list[str]:
    return [f"{E}/{s}" for s in seqs]


def test_a_worker_discards_what_it_never_sent() -> None:
    rights = kept()
    assert rights.discard(ids(0, 2)) == ids(0, 2)
    assert sorted(rights.unsent) == [1]


def test_a_worker_cannot_discard_what_it_sent() -> None:
    rights = kept()
    rights.sent("q", ids(0))
    with pytest.raises(NotHolder, match="sent and not nacked"):
        rights.discard(ids(0))


def test_one_bad_id_leaves_all_of_a_discard_undone() -> None:
    rights = kept()
    rights.sent("q", ids(0))
    with pytest.raises(NotHolder):
        rights.discard(ids(1, 0))
    assert sorted(rights.unsent) == [1, 2]


def test_a_nack_gives_the_reply_back_once() -> None:
    rights = kept()
    rights.sent("q", ids(0, 1))
    assert rights.nack("q") == ids(0, 1)
    assert rights.nack("q") == []
    assert (rights.nack_unknown, rights.unclaimed) == (1, 0)


def test_a_delivered_reply_cannot_be_nacked() -> None:
    rights = kept()
    rights.sent("q", ids(0))
    rights.delivered("q")
    assert rights.nack("q") == []


def test_the_memory_for_replies_is_bounded() -> None:
    rights = EnvRights(E, requests_max=2)
    for n in range(4):
        rights.keep(rights.mint(), byte_count=10)
        rights.sent(f"q{n}", ids(n))
    assert (rights.evicted, rights.unclaimed) == (2, 2)
    assert rights.nack("q0") == []


@pytest.mark.payload("F10")
def test_an_object_is_kept_once_and_only_with_a_minted_number() -> None:
    rights = kept(count=1)
    for seq in (0, 5, -1):
        with pytest.raises(NotHolder):
            rights.keep(seq, byte_count=10)


def test_numbers_without_a_keep_are_void() -> None:
    rights = kept(count=1)
    rights.mint()
    rights.keep(rights.mint(), byte_count=10)
    assert rights.void() == [1]


def test_ids_of_another_incarnation_are_not_the_workers() -> None:
    with pytest.raises(NotHolder, match="another incarnation"):
        kept().discard(["env.a.0000000000000002/0"])


def test_a_doubled_reply_is_taken_once() -> None:
    rights = ConsumerRights("orc.main.0000000000000001")
    assert rights.take(dict.fromkeys(ids(0, 1), 10)) == ids(0, 1)
    rights.drop(ids(0))
    assert rights.take(dict.fromkeys(ids(0, 1, 2), 10)) == ids(2)
    assert rights.dup_reply == 2


def test_a_reply_of_an_adopted_producer_is_refused() -> None:
    rights = ConsumerRights("orc.main.0000000000000001")
    rights.refuse(E)
    assert rights.take({ids(0)[0]: 10}) == []
    assert rights.late_refused == 1


@pytest.mark.fault(25)
def test_a_second_drop_is_counted_or_raises_in_strict_mode() -> None:
    for strict in (False, True):
        rights = ConsumerRights("orc.main.0000000000000001", strict=strict)
        rights.take({ids(0)[0]: 10})
        rights.drop(ids(0))
        if strict:
            with pytest.raises(DoubleDrop):
                rights.drop(ids(0))
        else:
            assert rights.drop(ids(0)) == []
            assert rights.suppressed == 1


@pytest.mark.fault(25)
def test_a_worker_that_discards_twice_is_counted_or_raises_in_strict_mode() -> None:
    lax, strict = kept(), kept(strict=True)
    for rights in (lax, strict):
        rights.discard(ids(0))
    assert (lax.discard(ids(0)), lax.suppressed) == ([], 1)
    with pytest.raises(DoubleDrop, match="dropped before"):
        strict.discard(ids(0))


def test_a_drop_of_what_was_never_taken_or_was_shipped_drops_nothing() -> None:
    rights = ConsumerRights("orc.main.0000000000000001")
    rights.take(dict.fromkeys(ids(0, 1), 10))
    rights.ship(0, ids(1))
    for bad, why in ((ids(0, 5), "never took"), (ids(0, 1), "shipped it")):
        with pytest.raises(NotHolder, match=why):
            rights.drop(bad)
    assert list(rights.held) == ids(0)


@pytest.mark.payload("F24")
def test_a_ship_moves_all_or_nothing() -> None:
    rights = ConsumerRights("orc.main.0000000000000001")
    rights.take(dict.fromkeys(ids(0, 1), 10))
    with pytest.raises(NotHolder, match="never took"):
        rights.ship(0, ids(0, 7))
    assert list(rights.held) == ids(0, 1)
    assert rights.ship(0, ids(0, 1, 0)) == ids(0, 1)
    with pytest.raises(NotHolder, match="shipped before"):
        rights.ship(0, [])


def test_a_step_is_taken_idempotently_and_only_as_one_batch() -> None:
    rights = StepRights("trn.main.0000000000000001")
    assert rights.take(0, n=2, checksum=9)
    assert not rights.take(0, n=2, checksum=9)
    with pytest.raises(StepError, match="another batch"):
        rights.take(0, n=2, checksum=8)


def test_a_released_step_cannot_be_taken_again() -> None:
    rights = StepRights("trn.main.0000000000000001")
    rights.take(0, n=2, checksum=9)
    assert rights.drop(0, 0) == [(0, 0)]
    with pytest.raises(StepReleased, match=r"commit of steps 0\.\.0 by trn"):
        rights.take(0, n=2, checksum=9)


def test_a_batch_released_by_an_earlier_trainer_is_named_and_another_batch_of_that_number_is_fine() -> None:
    rights = StepRights("trn.main.0000000000000001", released={(0, 2, 9): "the commit of steps 0..3 by trn.old"})
    with pytest.raises(StepReleased, match=r"trn\.old"):
        rights.take(0, n=2, checksum=9)
    assert rights.take(0, n=2, checksum=8)


def test_a_range_of_steps_drops_only_what_is_new() -> None:
    rights = StepRights("trn.main.0000000000000001")
    for step in range(4):
        rights.take(step, n=1, checksum=step)
    rights.drop(1, 1)
    assert rights.drop(0, 3) == [(0, 0), (2, 3)]
    assert rights.suppressed == 1
    with pytest.raises(NotHolder, match="never took step 4"):
        rights.drop(3, 4)
