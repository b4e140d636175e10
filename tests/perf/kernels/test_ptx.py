"""Loads, barriers and bytes that are read off a kernel's PTX, on a few written by hand."""

from __future__ import annotations

from chorus.perf.kernels.ptx import Ptx

HEAD = """
.version 8.4
.target sm_90a
.visible .entry gather(
	.param .u64 .ptr .global .align 16 gather_param_0, // table
	.param .u64 gather_param_1,
	.param .u32 gather_param_10
)
.reqntid 128
{
	.reg .pred 	%p<9>;
	.reg .b32 	%r<90>;
$L__func_begin0:
	.loc	1 20 3
	ld.param.b64 	%rd1, [gather_param_0];
	ld.param.b64 	%rd2, [gather_param_1];
	ld.param.b32 	%r9, [gather_param_10];
"""


def parse(body: str) -> Ptx:
    return Ptx.parse(HEAD + body + "\n}\n\t.section .debug_abbrev { .b8 1; }")


def test_a_load_waits_for_those_that_its_address_was_made_of():
    ptx = parse("""
	mov.u32 	%r1, %ctaid.x;
	mad.wide.s32 	%rd3, %r1, 4, %rd1;
	mov.u32 %r2, 0x0;
	ld.global.b32 { %r2 }, [ %rd3 + 0 ];
	mad.wide.s32 	%rd4, %r2, 4, %rd1;
	ld.global.b32 { %r3 }, [ %rd4 + 4 ];
	mad.wide.s32 	%rd5, %r3, 16, %rd2;
	ld.global.v4.b32 { %r4, %r5, %r6, %r7 }, [ %rd5 + 0 ];
	ret;""")
    assert ptx.loads_before(1) == 2, "the table's entry, and what it points to"
    assert ptx.loads_before(0) == 1, "the most of the loads through a pointer"
    assert ptx.loads_before(10) is None, "not a pointer, and no load either"
    assert ptx.bytes_at_once == 4 + 4 + 16


def test_a_load_waits_for_its_guard_and_for_the_branches_on_its_way():
    guarded = """
	ld.global.b32 { %r2 }, [ %rd1 + 0 ];
	setp.lt.s32 	%p1, %r2, %r9;
	@%p1 ld.global.b32 { %r3 }, [ %rd2 + 0 ];
	ret;"""
    assert parse(guarded).loads_before(1) == 1
    early = """
	ld.global.b32 { %r2 }, [ %rd1 + 0 ];
	setp.lt.s32 	%p1, %r2, 0;
	@!%p1 bra 	$L__BB0_2;
	bra.uni 	$L__BB0_1;
$L__BB0_2:
$L__tmp7:
	ld.global.b32 { %r3 }, [ %rd2 + 0 ];
$L__tmp8:
	ld.global.b32 { %r4 }, [ %rd2 + 4 ];
$L__BB0_1:
	ret;"""
    assert parse(early).loads_before(1) == 1
    assert parse(early).bytes_at_once == 8, "a debugger's labels part nothing"
    after = """
	ld.global.b32 { %r2 }, [ %rd1 + 0 ];
	setp.lt.s32 	%p1, %r2, 0;
	@%p1 bra 	$L__BB0_2;
	bar.sync 	0;
$L__BB0_2:
	ld.global.b32 { %r3 }, [ %rd2 + 0 ];
	ret;"""
    assert parse(after).loads_before(1) == 0, "run either way"
    assert parse(after).barriers == 1


def test_a_branch_may_lead_behind_a_scope_of_inline_assembly():
    ptx = parse("""
	setp.lt.s32 	%p1, %r9, 0;
	@%p1 bra 	$L__BB0_2;
	{
	.reg .pred complete;
	waitLoop:
	@!complete bra.uni waitLoop;
	}
	// end inline asm
$L__BB0_2:
	ld.global.b32 { %r2 }, [ %rd1 + 0 ];
	ret;""")
    assert "$L__BB0_2" in ptx.labels
    assert ptx.loads_before(0) == 0


def test_what_goes_round_a_loop_counts_once():
    ptx = parse("""
	mov.b64 	%rd3, %rd1;
$L__BB0_1:
	ld.global.b64 { %rd4 }, [ %rd3 + 0 ];
	add.s64 	%rd3, %rd1, %rd4;
	mad.wide.s32 	%rd5, %r8, 4, %rd2;
	cp.async.cg.shared.global [ %r7 + 0 ], [ %rd5 + 0 ], 0x10, %r6;
	setp.lt.s64 	%p1, %rd4, 0;
	@%p1 bra 	$L__BB0_1;
	bar.warp.sync 	-1;
	ld.shared.b32 	%r8, [%r7];
	ret;""")
    assert ptx.loads_before(0) == 1
    assert ptx.loads_before(1) == 1, "the loop goes on after the load that decides it"
    assert ptx.bytes_at_once == 8 + 16
    assert not ptx.barriers, "a warp's own"


def test_what_touches_others_values_waits_for_the_launch_before_on_every_way():
    waiting = """
	griddepcontrol.launch_dependents;
	ld.global.b32 { %r2 }, [ %rd1 + 0 ];
	setp.lt.s32 	%p1, %r2, 0;
	@%p1 bra 	$L__BB0_2;
	griddepcontrol.wait;
	st.global.b32 	[ %rd2 + 0 ], { %r2 };
	ret;
$L__BB0_2:
	griddepcontrol.wait;
	ret;"""
    assert not parse(waiting).is_early([1])
    assert parse(waiting).is_early([0, 1]), "the table's own load"
    leaving = waiting.replace("$L__BB0_2:\n\tgriddepcontrol.wait;", "$L__BB0_2:")
    assert leaving != waiting
    assert parse(leaving).is_early([1]), "a program that ends without having waited"
    assert parse(waiting.replace("0_2;\n\tgriddepcontrol.wait;", "0_2;")).is_early([1]), "the store"
    assert not parse("ld.global.b32 { %r2 }, [ %rd2 + 0 ];\n\tret;").is_early([1]), "launched after it, as a whole"
