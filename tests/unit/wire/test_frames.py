"""Frames: unsigned without a secret; with one, nothing unsigned, forged, replayed or stale is accepted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_pd_connector.errors import ConfigError, ProtocolError
from sgl_pd_connector.wire import messages as msg
from sgl_pd_connector.wire.address import Address
from sgl_pd_connector.wire.frames import MAX_SKEW, WINDOW, FrameCodec
from sgl_pd_connector.wire.secret import bearer_token, derive_key, require_secret

pytestmark = pytest.mark.unit

SECRET = "a secret of the deployment"
DONE = msg.Done(room=1, attempt=2)
NOW = 1_800_000_000.0


def test_without_a_secret_a_frame_is_the_message() -> None:
    assert FrameCodec(None).encode(DONE, NOW) == msg.encode(DONE)
    assert FrameCodec(None).decode(msg.encode(DONE), NOW) == DONE


def test_with_the_same_secret_messages_pass() -> None:
    sender, receiver = FrameCodec(SECRET), FrameCodec(SECRET)
    for _ in range(3):
        assert receiver.decode(sender.encode(DONE, NOW), NOW) == DONE


def test_the_secret_and_the_derived_keys_are_not_on_the_wire() -> None:
    frame = FrameCodec(SECRET).encode(DONE, NOW)
    assert SECRET.encode() not in frame
    assert derive_key(SECRET, "side channel") not in frame
    assert bearer_token(SECRET) != derive_key(SECRET, "side channel").hex()
    assert bearer_token(None) is None


@pytest.mark.parametrize(
    ("sender", "receiver", "names"),
    [
        (FrameCodec(None), FrameCodec(SECRET), "peer has no secret"),
        (FrameCodec(SECRET), FrameCodec(None), "this instance has no secret"),
        (FrameCodec("another secret, just as long"), FrameCodec(SECRET), "another secret"),
    ],
)
def test_sides_that_do_not_share_the_secret_say_what_is_missing(
    sender: FrameCodec, receiver: FrameCodec, names: str
) -> None:
    with pytest.raises(ProtocolError, match=names):
        receiver.decode(sender.encode(DONE, NOW), NOW)


def test_every_flipped_bit_is_noticed() -> None:
    frame = FrameCodec(SECRET).encode(DONE, NOW)
    for index in range(len(frame)):
        forged = frame[:index] + bytes([frame[index] ^ 1]) + frame[index + 1 :]
        with pytest.raises(ProtocolError):
            FrameCodec(SECRET).decode(forged, NOW)


def test_a_replay_is_refused_while_its_time_stamp_is_fresh() -> None:
    sender, receiver = FrameCodec(SECRET), FrameCodec(SECRET)
    frame = sender.encode(DONE, NOW)
    receiver.decode(frame, NOW)
    with pytest.raises(ProtocolError, match="replay"):
        receiver.decode(frame, NOW + MAX_SKEW - 1)


@pytest.mark.parametrize("offset", [MAX_SKEW + 1, -MAX_SKEW - 1])
def test_a_stale_frame_is_refused_and_the_clocks_are_named(offset: float) -> None:
    frame = FrameCodec(SECRET).encode(DONE, NOW)
    with pytest.raises(ProtocolError, match="clock"):
        FrameCodec(SECRET).decode(frame, NOW + offset)


def test_a_replay_is_refused_after_its_session_was_forgotten() -> None:
    sender, receiver = FrameCodec(SECRET), FrameCodec(SECRET)
    frame = sender.encode(DONE, NOW)
    receiver.decode(frame, NOW)
    receiver.decode(FrameCodec(SECRET).encode(DONE, NOW + 10 * MAX_SKEW), NOW + 10 * MAX_SKEW)
    with pytest.raises(ProtocolError):
        receiver.decode(frame, NOW + 10 * MAX_SKEW)
    assert len(receiver._sessions) == 1


@given(st.permutations(range(20)))
def test_reordered_frames_pass_exactly_once(order: list[int]) -> None:
    sender, receiver = FrameCodec(SECRET), FrameCodec(SECRET)
    frames = [sender.encode(DONE, NOW) for _ in order]
    for index in order:
        assert receiver.decode(frames[index], NOW) == DONE
    for index in order:
        with pytest.raises(ProtocolError, match="replay"):
            receiver.decode(frames[index], NOW)


def test_a_frame_older_than_the_window_is_refused_even_if_never_seen() -> None:
    sender, receiver = FrameCodec(SECRET), FrameCodec(SECRET)
    first = sender.encode(DONE, NOW)
    for _ in range(WINDOW):
        receiver.decode(sender.encode(DONE, NOW), NOW)
    with pytest.raises(ProtocolError, match="replay"):
        receiver.decode(first, NOW)


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_but_protocol_error(junk: bytes) -> None:
    for codec in (FrameCodec(SECRET), FrameCodec(None)):
        for frame in (junk, b"\xc1" + junk):
            with pytest.raises(ProtocolError):
                codec.decode(frame, NOW)


def test_an_address_that_others_reach_needs_a_secret_or_a_word() -> None:
    outside = Address.of("10.1.2.3", 1, setting="host")
    with pytest.raises(ConfigError, match="secret_file"):
        require_secret(outside, None, allow_insecure=False)
    require_secret(outside, SECRET, allow_insecure=False)
    require_secret(outside, None, allow_insecure=True)
    require_secret(Address.of("::1", 1, setting="host"), None, allow_insecure=False)
