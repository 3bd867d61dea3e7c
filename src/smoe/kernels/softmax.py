"""The softmax of a block of scores with the bits of torch's CPU attention, as LLVM text for `attention.py`.

Scores become exp(score - maximum), rounded to bf16: by a polynomial in whole registers of 16, and by libm's expf for
the remaining ones. Their sum, which is taken before rounding, uses two alternating running sums of registers. The
halves of these are added repeatedly until one number is left; the remaining scores are added one by one.
"""

from __future__ import annotations

from smoe.kernels.registers import broadcast, constant, filled, from_bits, joined, rounded, single


def source() -> str:
    """Return the LLVM text of `softmax`: scores s [n] become exp(s * scale - maximum), rounded to bf16 and stored as
    float32.

    `state` contains the maximum of all scores and the sum of the exponentials, over the blocks of keys until now. If a
    later block raises the maximum, the earlier outputs `totals` [size] are multiplied by exp(old maximum - new
    maximum).
    """
    return f"""
declare float @llvm.fma.f32(float, float, float)
declare <16 x float> @llvm.floor.v16f32(<16 x float>)
declare float @llvm.vector.reduce.fmax.v16f32(<16 x float>)

define internal void @softmax(ptr noalias %s, i64 %n, float %scale, i1 %is.first, ptr noalias %state,
                              ptr noalias %totals, i64 %size, ptr %expf) #1 {{
{_largest()}
{_maximum()}
{_exps()}
{_rest()}
{_update()}
done:
  ret void
}}
"""


def _largest() -> str:
    """Return LLVM text that multiplies a block's scores by the scale in place, and finds in each of 16 lanes the
    largest of the lane's scores, among the first n scores."""
    lanes = "<" + ", ".join(f"i64 {n}" for n in range(16)) + ">"
    return f"""\
entry:
{broadcast("scale", "%scale")}
{broadcast("n", "%n", "i64")}
  br label %largest
largest:
  %i = phi i64 [0, %entry], [%i.next, %largest]
  %max = phi <16 x float> [{filled("float 0xFFF0000000000000")}, %entry], [%max.next, %largest]
  %s.at = getelementptr float, ptr %s, i64 %i
  %raw = load <16 x float>, ptr %s.at, align 64
  %x = fmul <16 x float> %raw, %scale.all
  store <16 x float> %x, ptr %s.at, align 64
{broadcast("i", "%i", "i64")}
  %place = add <16 x i64> %i.all, {lanes}
  %is.key = icmp slt <16 x i64> %place, %n.all
  %is.larger = fcmp ogt <16 x float> %x, %max
  %wins = and <16 x i1> %is.key, %is.larger
  %max.next = select <16 x i1> %wins, <16 x float> %x, <16 x float> %max
  %i.next = add i64 %i, 16
  %i.more = icmp slt i64 %i.next, %n
  br i1 %i.more, label %largest, label %maximum"""


def _maximum() -> str:
    """Return LLVM text that computes the maximum of the scores of this block and of earlier blocks."""
    return f"""\
maximum:
  %block.max = call float @llvm.vector.reduce.fmax.v16f32(<16 x float> %max.next)
  %sum.at = getelementptr float, ptr %state, i64 1
  %old.max.kept = load float, ptr %state
  %old.sum.kept = load float, ptr %sum.at
  %old.max = select i1 %is.first, float 0xFFF0000000000000, float %old.max.kept
  %old.sum = select i1 %is.first, float 0.0, float %old.sum.kept
  %is.old = fcmp ogt float %old.max, %block.max
  %new.max = select i1 %is.old, float %old.max, float %block.max
{broadcast("new.max", "%new.max")}
  %whole = and i64 %n, -16
  %any.whole = icmp sgt i64 %whole, 0
  br i1 %any.whole, label %exps, label %fold"""


def _exps() -> str:
    """Return LLVM text that replaces the scores in whole registers by exponentials, and adds the exponentials to two
    alternating sums."""
    return f"""\
exps:
  %j = phi i64 [0, %maximum], [%j.next, %exps]
  %a = phi <16 x float> [zeroinitializer, %maximum], [%b, %exps]
  %b = phi <16 x float> [zeroinitializer, %maximum], [%a.next, %exps]
  %y.at = getelementptr float, ptr %s, i64 %j
  %y = load <16 x float>, ptr %y.at, align 64
  %below = fsub <16 x float> %y, %new.max.all
{_exp("%below")}
  %a.next = fadd <16 x float> %a, %exp
{rounded("p", "%exp.bits")}
  store <16 x i32> %p, ptr %y.at, align 64
  %j.next = add i64 %j, 16
  %j.more = icmp slt i64 %j.next, %whole
  br i1 %j.more, label %exps, label %fold"""


def _rest() -> str:
    """Return LLVM text that reduces the two sums of exponentials to one number, and then handles the scores of the
    block that fill no whole register, one by one."""
    return f"""\
fold:
  %a.last = phi <16 x float> [zeroinitializer, %maximum], [%b, %exps]
  %b.last = phi <16 x float> [zeroinitializer, %maximum], [%a.next, %exps]
  %f16 = fadd <16 x float> %a.last, %b.last
{joined(_fold(width) for width in (8, 4, 2, 1))}
  %folded = extractelement <16 x float> %f1, i64 0
  %any.rest = icmp slt i64 %whole, %n
  br i1 %any.rest, label %rest, label %update
rest:
  %r = phi i64 [%whole, %fold], [%r.next, %rest]
  %sum = phi float [%folded, %fold], [%sum.next, %rest]
  %r.at = getelementptr float, ptr %s, i64 %r
  %z = load float, ptr %r.at
  %z.below = fsub float %z, %new.max
  %z.exp = call float %expf(float %z.below)
  %sum.next = fadd float %sum, %z.exp
  %z.bits = bitcast float %z.exp to i32
{rounded("z.p", "%z.bits", "i32")}
  store i32 %z.p, ptr %r.at
  %r.next = add i64 %r, 1
  %r.more = icmp slt i64 %r.next, %n
  br i1 %r.more, label %rest, label %update"""


def _update() -> str:
    """Return LLVM text that updates the sum of exponentials over all blocks, and multiplies earlier outputs by exp(old
    maximum - new maximum)."""
    return f"""\
update:
  %block.sum = phi float [%folded, %fold], [%sum.next, %rest]
  %shift = fsub float %old.max, %new.max
  %factor = call float %expf(float %shift)
  %new.sum = call float @llvm.fma.f32(float %factor, float %old.sum, float %block.sum)
  store float %new.max, ptr %state
  store float %new.sum, ptr %sum.at
  br i1 %is.first, label %done, label %rescale
rescale:
{broadcast("factor", "%factor")}
  br label %scaling
scaling:
  %d = phi i64 [0, %rescale], [%d.next, %scaling]
  %out.at = getelementptr float, ptr %totals, i64 %d
  %out = load <16 x float>, ptr %out.at, align 64
  %scaled = fmul <16 x float> %out, %factor.all
  store <16 x float> %scaled, ptr %out.at, align 64
  %d.next = add i64 %d, 16
  %d.more = icmp slt i64 %d.next, %size
  br i1 %d.more, label %scaling, label %done"""


def _exp(x: str) -> str:
    """Return LLVM text for torch's `fexp_u20` of x: 2 ** (x * log2(e)), with a polynomial for the fraction. The result
    is computed as the bits of a float32."""
    fma = "call <16 x float> @llvm.fma.v16f32"
    c0, c1, c2, c3 = (
        constant(c) for c in (0.00010703434948458272, 0.30354260500649682, -0.22433836478672356, -0.079204240219773236)
    )
    return f"""\
  %power = fmul <16 x float> {x}, {constant(1.44269504)}
  %floor = call <16 x float> @llvm.floor.v16f32(<16 x float> %power)
  %fraction = fsub <16 x float> %power, %floor
  %h2 = {fma}(<16 x float> %fraction, <16 x float> {c3}, <16 x float> {c2})
  %h1 = {fma}(<16 x float> %fraction, <16 x float> %h2, <16 x float> {c1})
  %h0 = {fma}(<16 x float> %fraction, <16 x float> %h1, <16 x float> {c0})
  %corrected = fsub <16 x float> %power, %h0
  %as.bits = {fma}(<16 x float> {constant(2.0**23)}, <16 x float> %corrected, <16 x float> {constant(127 * 2.0**23)})
  %bits = fptosi <16 x float> %as.bits to <16 x i32>
  %vanishes = fcmp olt <16 x float> {x}, {filled(f"float {single(from_bits(0xC2AEAC50))}")}
  %exp.bits = select <16 x i1> %vanishes, <16 x i32> zeroinitializer, <16 x i32> %bits
  %exp = bitcast <16 x i32> %exp.bits to <16 x float>"""


def _fold(width: int) -> str:
    """Return LLVM text that adds lane i + width to lane i. Repeated with half the width each time, it leaves in lane 0
    the same sum as torch's method of exchanging halves."""
    mask = ", ".join(f"i32 {n ^ width}" for n in range(16))
    return f"""\
  %m{width} = shufflevector <16 x float> %f{2 * width}, <16 x float> poison, <16 x i32> <{mask}>
  %f{width} = fadd <16 x float> %f{2 * width}, %m{width}"""
