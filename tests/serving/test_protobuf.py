"""The wire: bytes that the SDK wrote are read, the SDK reads those that are written here, damaged ones are refused."""

from __future__ import annotations

import random
import struct

import numpy as np
import pytest

from engine.errors import UserError
from rankfold.serving.loss_request import head_of, read_forward_backward
from rankfold.serving.protobuf import WireError, decode, encode

RECORDED = bytes.fromhex(
    "0a09733a747261696e3a3010071a640a100a0e0a0c03000000040000000500000012300a0d7461726765745f746f6b656e73121f0a18040000"
    "0000000000050000000000000001000000000000001802220103121e0a077765696768747312130a0c000000000000803f0000003f18012201"
    "03220370706f2a1d0a12636c69705f6c6f775f7468726573686f6c6411cdccccccccccec3f30013a1f0a12636c69705f6c6f775f7468726573"
    "686f6c64120909cdccccccccccec3f"
)
"""A ForwardBackwardRequest as SDK 0.38 sends it."""


def test_a_recorded_request() -> None:
    message = decode("ForwardBackwardRequest", RECORDED)
    assert message["loss_fn_config"] == {"clip_low_threshold": 0.9}
    assert message["loss_fn_config_v2"] == {"clip_low_threshold": {"number": 0.9}}
    assert (message["seq_id"], message["forward_only"], head_of(RECORDED)) == (7, True, ("s:train:0", 7))
    with pytest.raises(UserError, match="datum 0 has no logprobs, which ppo needs"):
        read_forward_backward(RECORDED, vocab_size=6, limit=8)
    message |= {"loss_fn": "cross_entropy", "loss_fn_config": {}, "loss_fn_config_v2": {}}
    read = read_forward_backward(encode("ForwardBackwardRequest", message), vocab_size=6, limit=8)
    assert read.forward_only and read.data[0].tokens.tolist() == [3, 4, 5]
    assert read.data[0].targets.tolist() == [4, 5, 1]
    assert read.data[0].inputs["weights"].tolist() == [0.0, 1.0, 0.5]


def test_the_sdk_reads_what_is_written() -> None:
    theirs = pytest.importorskip("tinker.proto.tinker_public_pb2")
    request = theirs.ForwardBackwardRequest.FromString(RECORDED)
    again = encode("ForwardBackwardRequest", decode("ForwardBackwardRequest", RECORDED))
    assert request == theirs.ForwardBackwardRequest.FromString(again)
    record = {
        "type_tag": "ArrayRecord",
        "fields": {"logprobs": {"data": b"12345678", "offsets": struct.pack("<2q", 0, 8), "dtype": 1}},
        "num_datums": 1,
    }
    output = {"loss_fn_output_type": "ArrayRecord", "loss_fn_outputs": [record], "metrics": {"loss:sum": -2.5}}
    read = theirs.ForwardBackwardOutput.FromString(encode("ForwardBackwardOutput", output))
    assert dict(read.metrics) == {"loss:sum": -2.5} and read.loss_fn_outputs[0].fields["logprobs"].data == b"12345678"
    tokens = np.asarray([3, 4], np.int32).tobytes()
    sample = {"sequences": [{"stop_reason": 1, "tokens": tokens}, {"stop_reason": 0, "tokens": b""}]}
    sampled = theirs.SampleResponse.FromString(encode("SampleResponse", sample))
    assert [one.stop_reason for one in sampled.sequences] == [1, 0] and sampled.sequences[0].tokens == tokens


@pytest.mark.parametrize(
    ("data", "flaw"),
    [
        ("0a05", "ends 5 bytes behind"),
        ("0a", "ends inside of a number"),
        ("ff" * 11, "more than 64 bits"),
        ("0b00", "wire type 3"),
        ("0200", "has number 0"),
        ("0a02ff00", "is not UTF-8"),
        ("1203000000", "not that of integer"),
        ("2a021000", "not that of double"),
    ],
)
def test_what_is_no_message_is_refused(data: str, flaw: str) -> None:
    with pytest.raises(WireError, match=flaw):
        decode("ForwardBackwardRequest", bytes.fromhex(data))


def test_damaged_bytes_are_read_or_refused() -> None:
    drawn = random.Random(0)
    refused = 0
    for _ in range(2000):
        data = bytearray(RECORDED)
        for _ in range(drawn.randrange(1, 4)):
            data[drawn.randrange(len(data))] = drawn.randrange(256)
        try:
            read_forward_backward(bytes(data[: drawn.randrange(1, len(data) + 1)]), vocab_size=6, limit=8)
        except UserError:
            refused += 1
    assert refused > 1000


def test_integers_of_both_signs() -> None:
    for value in (0, 1, 127, 128, 2**31, 2**63 - 1, -1, -(2**63)):
        message = {"trailing_shape": [value], "dtype": value}
        assert decode("BatchedTensor", encode("BatchedTensor", message)) == message
    packed = bytes.fromhex("2203ac0205")
    assert decode("Tensor", packed) == {"shape": [300, 5]}
