"""What many processes share: leases, delivery, new lives. Messages go by hand, time too."""

from __future__ import annotations

import random

from lousho_ray.limits.rate import BucketState, WindowState
from lousho_ray.limits.shared import (
    FORGET_AFTER_S,
    LEASE_S,
    RECOVERY_S,
    TRAVEL_S,
    Exchange,
    Listen,
    Registration,
    Reply,
    SharedLimits,
)
from lousho_ray.options import RateLimits

ONE = RateLimits(max_concurrent=1)


class Life:
    """One life of the actor, with its news."""

    def __init__(self, epoch: str = "first", now: float = 0.0, *, restarted: bool = False, first_arrival: int = 0) -> None:
        self.told: list[str] = []
        self.shared = SharedLimits(epoch=epoch, now=now, restarted=restarted, first_arrival=first_arrival, on_news=self.told.append)


class Peer:
    """One process, written out: what `LimiterClient` does with the messages."""

    def __init__(self, name: str, life: Life, limits: RateLimits = ONE, now: float = 0.0) -> None:
        self.name = name
        self.life = life
        self.seq = 0
        self.confirmed = 0
        self.got: list[int] = []
        self.life.shared.register(name, 0, [Registration("x", limits)], now)

    def exchange(self, now: float = 0.0, *, enter: tuple[int, ...] = (), release: tuple[int, ...] = (), **rest: object) -> Reply:
        self.seq += 1
        return self.send(self.message(enter, release, **rest), now)

    def message(self, enter: tuple[int, ...] = (), release: tuple[int, ...] = (), **rest: object) -> Exchange:
        entries = [("x", number, 10) for number in enter]
        return Exchange(self.name, self.life.shared.epoch, self.seq, self.confirmed, releases=release, entries=entries, **rest)  # type: ignore[arg-type]

    def send(self, message: Exchange, now: float = 0.0) -> Reply:
        return self.take(self.life.shared.exchange(message, now))

    def listen(self, now: float = 0.0, *, again: bool = False) -> Reply | None:
        reply = self.life.shared.listen(Listen(self.name, self.life.shared.epoch, self.confirmed, again), now)
        return None if reply is None else self.take(reply)

    def take(self, reply: Reply) -> Reply:
        new = reply.grants[max(0, self.confirmed - reply.first) :]
        self.got += [number for number, _ in new]
        self.confirmed = max(self.confirmed, reply.first + len(reply.grants))
        return reply


def test_an_exchange_answers_with_what_is_granted_at_once_and_later_grants_are_news() -> None:
    # RL-10, RL-38
    life = Life()
    a, b = Peer("a", life), Peer("b", life)
    a.exchange(enter=(1, 2))
    b.exchange(enter=(1,))
    assert (a.got, b.got) == ([1], [])
    a.exchange(release=(1,))
    assert a.got == [1, 2], "first in, first out over all processes"
    a.exchange(release=(2,))
    assert life.told == ["b"], "only a process that did not ask is woken"
    b.listen()
    assert b.got == [1]
    assert b.listen() is None


def test_an_exchange_sent_twice_is_done_once() -> None:
    life = Life()
    a = Peer("a", life, RateLimits(max_concurrent=5))
    a.seq = 1
    message = a.message(enter=(1, 2))
    first = life.shared.exchange(message, 0.0)
    again = a.send(message)
    assert again == first, "a lost answer is given again"
    a.send(message)
    assert a.got == [1, 2]
    stats = life.shared.stats("x", 0.0)
    assert stats is not None
    assert (stats.running, stats.requests_in_window) == (2, 2)


def test_a_late_copy_of_an_old_exchange_does_nothing() -> None:
    # async actors keep no call order
    life = Life()
    a = Peer("a", life)
    a.seq = 1
    old = a.message(enter=(1,))
    a.send(old)
    a.exchange(release=(1,))
    a.send(old)
    stats = life.shared.stats("x", 0.0)
    assert stats is not None
    assert (stats.running, stats.waiting) == (0, 0)


def test_grants_are_repeated_until_they_are_confirmed() -> None:
    life = Life()
    a = Peer("a", life)
    b = Peer("b", life)
    a.exchange(enter=(1,))
    b.exchange(enter=(1,))
    a.exchange(release=(1,))
    lost = life.shared.listen(Listen("b", "first", 0), 0.0)
    assert lost is not None
    assert b.listen() is None, "it was told already"
    assert b.listen(again=True) is not None
    assert b.got == [1]
    assert b.listen(again=True) is None, "confirmed now"


def test_a_silent_process_loses_its_slots_and_its_place_but_its_bookings_stay() -> None:
    # RL-34
    life = Life()
    dead, alive = Peer("dead", life), Peer("alive", life)
    dead.exchange(0.0, enter=(1, 2))
    alive.exchange(0.0, enter=(1,))
    for at in (10.0, 20.0):
        alive.listen(at)
        life.shared.tick(at)
    life.shared.tick(LEASE_S - 0.1)
    alive.listen(LEASE_S - 0.1)
    assert alive.got == []
    assert life.shared.next_wakeup() <= LEASE_S
    life.shared.tick(LEASE_S)
    alive.listen(LEASE_S)
    assert alive.got == [1]
    stats = life.shared.stats("x", LEASE_S)
    assert stats is not None
    assert (stats.waiting, stats.running, stats.requests_in_window) == (0, 1, 2)


def test_a_process_that_listens_keeps_its_slots() -> None:
    # RL-34
    life = Life()
    a = Peer("a", life)
    a.exchange(0.0, enter=(1,))
    for at in range(10, 200, 10):
        life.shared.tick(float(at))
        a.listen(float(at))
        life.shared.tick(float(at))
    stats = life.shared.stats("x", 200.0)
    assert stats is not None
    assert stats.running == 1


def test_what_a_dead_process_left_listening_does_not_keep_it_alive() -> None:
    # RL-34: the answer goes nowhere, at up to a third of the lease after its death
    life = Life()
    Peer("a", life).exchange(0.0, enter=(1,))
    life.shared.news("a")
    life.shared.tick(LEASE_S)
    reply = life.shared.news("a")
    assert reply is not None
    assert not reply.known


def test_a_process_given_up_must_register_before_it_goes_on_when_it_holds_something() -> None:
    # RL-34
    life = Life()
    a = Peer("a", life)
    a.exchange(0.0, enter=(1,))
    life.shared.tick(LEASE_S)
    assert not a.exchange(LEASE_S, enter=(2,), holding=True).known
    life.shared.register("a", a.confirmed, [Registration("x", ONE, "first", running=[(1, 10, 0)])], LEASE_S)
    assert a.exchange(LEASE_S, enter=(2,), holding=True).known
    assert a.got == [1]
    a.exchange(LEASE_S, release=(1,))
    assert a.got == [1, 2]


def test_an_idle_process_comes_back_without_registering() -> None:
    life = Life()
    a = Peer("a", life)
    a.exchange(0.0, enter=(1,))
    a.exchange(0.0, release=(1,))
    life.shared.tick(LEASE_S)
    assert a.exchange(LEASE_S, enter=(2,)).known
    assert a.got == [1, 2]


def test_a_new_life_knows_nobody_and_keeps_the_old_order() -> None:
    # RL-36
    life = Life()
    a, b = Peer("a", life), Peer("b", life)
    a.exchange(enter=(1,))
    b.exchange(enter=(1,))
    a.exchange(enter=(2,))
    new = Life("second", 100.0, restarted=True, first_arrival=1000)
    message = Exchange("a", "first", 7, 1, True)
    assert new.shared.exchange(message, 100.0) == Reply("second", known=False)
    newcomer = Peer("c", new, now=100.0)
    newcomer.exchange(100.0, enter=(1,))
    new.shared.register("b", 0, [Registration("x", ONE, "first", waiting=[(1, 10, 1)])], 100.5)
    new.shared.register("a", 1, [Registration("x", ONE, "first", waiting=[(2, 10, 2)], running=[(1, 10, 0)])], 101.0)
    a.life = b.life = new
    new.shared.tick(100.0 + RECOVERY_S)
    stats = new.shared.stats("x", 100.0 + RECOVERY_S)
    assert stats is not None
    assert (stats.running, stats.waiting) == (1, 3), "the slot that is held is not given again"
    a.exchange(104.0, release=(1,))
    b.listen(104.0)
    b.exchange(105.0, release=(1,))
    a.listen(105.0)
    a.exchange(106.0, release=(2,))
    newcomer.listen(106.0)
    assert (b.got, a.got, newcomer.got) == ([1], [1, 2], [1])


def test_nobody_is_admitted_before_a_new_life_has_heard_of_the_calls_in_flight() -> None:
    # RL-36
    new = Life("second", 100.0, restarted=True)
    early = Peer("early", new, now=100.0)
    early.exchange(100.1, enter=(1,))
    assert early.got == []
    assert new.shared.next_wakeup() == 100.0 + RECOVERY_S
    new.shared.tick(100.0 + RECOVERY_S)
    early.listen(100.0 + RECOVERY_S)
    assert early.got == [1]


def test_a_new_life_takes_its_windows_for_half_used_for_a_minute() -> None:
    # RL-36
    limits = RateLimits(requests_per_minute=4)
    new = Life("second", 100.0, restarted=True)
    a = Peer("a", new, limits, now=101.0)
    a.exchange(104.0, enter=(1, 2, 3, 4))
    for at in (120.0, 140.0, 159.9):
        a.listen(at)
        new.shared.tick(at)
    assert a.got == [1, 2]
    new.shared.tick(160.0 + TRAVEL_S)
    a.listen(160.0 + TRAVEL_S)
    assert a.got == [1, 2, 3, 4]


def test_an_actor_made_anew_is_a_new_life_to_those_who_knew_the_old_one() -> None:
    # RL-36: nobody restarted it, but its limiter was used before
    new = Life("second", 100.0)
    new.shared.register("a", 0, [Registration("x", RateLimits(requests_per_minute=4), "first")], 100.0)
    stats = new.shared.stats("x", 104.0)
    assert stats is not None
    assert stats.requests_in_window == 2


def test_registering_twice_changes_nothing() -> None:
    # RL-33
    life = Life()
    windows = WindowState([BucketState(5.0, 2, 77)], [BucketState(5.0, 300, 77)])
    registration = Registration("x", RateLimits(max_concurrent=2), None, [(2, 10, 5)], [(1, 10, 77), (3, 10, 77)], windows)
    for _ in range(2):
        life.shared.register("a", 0, [registration], 10.0)
    stats = life.shared.stats("x", 10.0)
    assert stats is not None
    assert (stats.waiting, stats.running, stats.requests_in_window, stats.tokens_in_window) == (1, 2, 2, 300)


def test_a_limiter_known_with_other_limits_is_refused_and_the_others_are_not() -> None:
    # RL-32
    life = Life()
    Peer("a", life)
    answer = life.shared.register("b", 0, [Registration("x", RateLimits(max_concurrent=2)), Registration("y", ONE)], 0.0)
    assert answer.refused == {"x": ONE}
    assert life.shared.stats("y", 0.0) is not None


def test_a_withdrawn_call_gives_everything_back_wherever_it_is() -> None:
    # RL-21
    life = Life()
    a = Peer("a", life, RateLimits(max_concurrent=1, requests_per_minute=10))
    a.exchange(enter=(1, 2, 3))
    a.exchange(withdrawals=[2])
    a.exchange(withdrawals=[1])
    assert a.got == [1, 3]
    stats = life.shared.stats("x", 0.0)
    assert stats is not None
    assert (stats.waiting, stats.running, stats.requests_in_window) == (0, 1, 1)


def test_an_unused_limiter_is_forgotten_and_its_name_is_free() -> None:
    # RL-32
    life = Life()
    a = Peer("a", life)
    a.exchange(0.0, enter=(1,))
    now = 0.0
    while now < FORGET_AFTER_S + 2 * LEASE_S:
        now = life.shared.next_wakeup()
        life.shared.tick(now)
    assert life.shared.stats("x", now) is None
    assert not a.exchange(now, enter=(2,)).known
    assert life.shared.register("b", 0, [Registration("x", RateLimits(max_concurrent=9))], now).refused == {}


def test_only_due_limiters_are_looked_at() -> None:
    # RL-09
    life = Life()
    limits = RateLimits(requests_per_minute=1)
    registrations = [Registration(f"limiter-{n}", limits) for n in range(50)]
    life.shared.register("a", 0, registrations, 0.0)
    for n in range(50):
        entries = [(f"limiter-{n}", 2 * n, 1), (f"limiter-{n}", 2 * n + 1, 1)]
        life.shared.exchange(Exchange("a", "first", n, n, entries=entries), float(n) / 10)
    assert life.shared.next_wakeup() == LEASE_S + 0.0
    life.shared.listen(Listen("a", "first", 50), 29.0)
    life.shared.tick(30.0)
    life.shared.listen(Listen("a", "first", 50), 55.0)
    assert life.shared.next_wakeup() <= 60.0 + TRAVEL_S
    life.shared.tick(60.0 + TRAVEL_S)
    reply = life.shared.listen(Listen("a", "first", 50), 60.0 + TRAVEL_S)
    assert reply is not None
    assert [number for number, _ in reply.grants] == [1]


def test_any_loss_repetition_and_reordering_of_messages_keeps_slots_and_order() -> None:
    """RL-06, RL-07, RL-21: three processes over a bad network."""
    chance = random.Random(11)
    for _ in range(60):
        life = Life()
        limits = RateLimits(max_concurrent=2)
        peers = [Peer(name, life, limits) for name in "abc"]
        held: dict[str, set[int]] = {peer.name: set() for peer in peers}
        entered = dict.fromkeys("abc", 0)
        for step in range(80):
            peer = chance.choice(peers)
            now = step / 10
            before = len(peer.got)
            if chance.random() < 0.4:
                peer.listen(now, again=chance.random() < 0.5)
            else:
                gone = tuple(number for number in held[peer.name] if chance.random() < 0.5)
                held[peer.name] -= set(gone)
                enter = tuple(entered[peer.name] + n for n in range(chance.randrange(3)))
                entered[peer.name] += len(enter)
                peer.seq += 1
                message = peer.message(enter, gone)
                for _ in range(chance.randrange(3)):
                    life.shared.exchange(message, now)
                peer.send(message, now)
            held[peer.name] |= set(peer.got[before:])
            assert sum(map(len, held.values())) <= 2
            assert peer.got == sorted(peer.got)
            assert len(peer.got) == len(set(peer.got))
