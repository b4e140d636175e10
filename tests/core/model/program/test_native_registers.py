"""Values have registers of their memory and width, from where they are written to where they are read last."""

from __future__ import annotations

from chorus.core.model.program.native_registers import Held, Registers, Value
from chorus.ops.library.native_program import NativeOp, Register


def op(kind: str, **arguments: object) -> NativeOp:
    return NativeOp(kind, arguments)


def test_the_residual_stream_is_the_first():
    registers = Registers(8)
    (found,) = registers.placed([op("Gemm", x=Held(Value("n", 8), "Rounded"), out=registers.stream)])
    assert found.arguments == {"x": 1, "out": 0}
    assert registers.all == [Register("Float", 8), Register("Rounded", 8)]


def test_an_op_of_rows_may_write_where_it_reads():
    a, b = Held(Value("a", 8)), Held(Value("b", 8))
    registers = Registers(8)
    ops = registers.placed([op("Gemm", out=a), op("Norm", x=a, out=b), op("Add", x=registers.stream, y=b)])
    assert [each.arguments.get("out") for each in ops[:2]] == [1, 1]


def test_a_product_may_not():
    a, b = Held(Value("a", 8), "Rounded"), Held(Value("b", 8), "Rounded")
    _, second = Registers(8).placed([op("Copy", out=a), op("GateUp", gemm={"x": a}, act=b)])
    assert second.arguments["gemm"]["x"] != second.arguments["act"]


def test_values_that_live_at_once_lie_apart_and_layers_share_registers():
    registers = Registers(8)

    def layer() -> list[NativeOp]:
        a, b, wide = Held(Value("a", 8)), Held(Value("b", 8)), Held(Value("wide", 16))
        return [
            op("Gemm", out=a),
            op("Gemm", out=b),
            op("Gemm", out=wide),
            op("Sum", x=a, y=b, out=Held(Value("c", 8))),
        ]

    first, second = registers.placed(layer()), registers.placed(layer())
    assert [each.arguments for each in first] == [each.arguments for each in second]
    assert len({each.arguments["out"] for each in first[:3]}) == 3
    assert len(registers.all) == 4
