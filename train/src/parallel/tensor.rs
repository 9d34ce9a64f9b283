//! Tensor and sequence parallelism: the sums over TP-split dimensions, and the token cut of SP around them.
//!
//! In canonical numerics a sum over a TP-split dimension is a fixed tree over `tp_leaves` blocks: a rank adds the aligned
//! sub-tree of its own blocks, and `Reduce::Tree` adds those in the order of positions, so the whole is the same tree under
//! every TP degree. In fast numerics each rank has one block.

use super::{Machine, StepError};
use crate::backend::{Backend, BackendError, Op, View};
use crate::comm::Site;
use std::ops::Range;

/// All local tokens from the share that SP leaves this rank; without SP `full` is `share` itself.
pub(crate) fn gather_tokens(
    machine: &mut Machine,
    site: Site,
    share: View,
    full: View,
) -> Result<(), StepError> {
    if share == full {
        return Ok(());
    }
    let ticket = machine.comms.tp.all_gather(machine.be, site, share, full)?;
    Ok(machine.comms.tp.wait(machine.be, ticket)?)
}

/// The sum over TP of `partial`: this rank's share of the tokens under SP; without SP `share` is `partial` itself.
pub(crate) fn reduce_tokens(
    machine: &mut Machine,
    site: Site,
    partial: View,
    share: View,
) -> Result<(), StepError> {
    let tp = &machine.comms.tp;
    let ticket = match share == partial {
        true => tp.all_reduce(machine.be, site, machine.tp_sum, partial)?,
        false => tp.reduce_scatter(machine.be, site, machine.tp_sum, partial, share)?,
    };
    Ok(tp.wait(machine.be, ticket)?)
}

/// Writes one block of a sum into the view it is given.
type Block<'a> = dyn FnMut(&mut dyn Backend, usize, View) -> Result<(), BackendError> + 'a;

/// `out` = the pairwise sum of the blocks with these numbers, a power of two of them.
/// `scratch`: one view like `out` for each level of the tree below the top.
pub(crate) fn sum_blocks(
    be: &mut dyn Backend,
    blocks: Range<usize>,
    out: View,
    scratch: &[View],
    block: &mut Block,
) -> Result<(), BackendError> {
    if blocks.len() == 1 {
        return block(be, blocks.start, out);
    }
    let mid = blocks.start + blocks.len() / 2;
    sum_blocks(be, blocks.start..mid, out, scratch, block)?;
    let (other, deeper) = scratch.split_first().expect("one scratch view a level");
    sum_blocks(be, mid..blocks.end, *other, deeper, block)?;
    be.run(Op::Add { src: *other, dst: out })
}
