//! Tensor and sequence parallelism: the sums over TP-split dimensions, and the token cut of SP around them.
//!
//! A sum over a TP-split dimension is a fixed tree over `tp_leaves` blocks: a rank adds the aligned sub-tree of its own blocks,
//! and `Reduce::Tree` adds those in the order of positions, so the whole is the same tree under every TP degree.

use super::{Cx, StepError};
use crate::backend::{Backend, BackendError, Op, View};
use crate::comm::{Reduce, Site};

/// All local tokens from the share that SP leaves this rank; without SP `full` is `share` itself.
pub(crate) fn gather_tokens(cx: &mut Cx, site: Site, share: View, full: View) -> Result<(), StepError> {
    if share == full {
        return Ok(());
    }
    let ticket = cx.comms.tp.all_gather(cx.be, site, share, full)?;
    Ok(cx.comms.tp.wait(cx.be, ticket)?)
}

/// The sum over TP of `partial`: this rank's share of the tokens under SP; without SP `share` is `partial` itself.
pub(crate) fn reduce_tokens(cx: &mut Cx, site: Site, partial: View, share: View) -> Result<(), StepError> {
    let tp = &cx.comms.tp;
    let ticket = match share == partial {
        true => tp.all_reduce(cx.be, site, Reduce::Tree, partial)?,
        false => tp.reduce_scatter(cx.be, site, Reduce::Tree, partial, share)?,
    };
    Ok(tp.wait(cx.be, ticket)?)
}

/// `out` = the pairwise sum of `num_blocks` blocks, a power of two; `block` writes one of them into the view it is given.
/// `scratch`: one view like `out` for each level of the tree below the top.
pub(crate) fn sum_blocks(
    be: &mut dyn Backend,
    num_blocks: usize,
    out: View,
    scratch: &[View],
    block: &mut dyn FnMut(&mut dyn Backend, usize, View) -> Result<(), BackendError>,
) -> Result<(), BackendError> {
    sub_tree(be, 0, num_blocks, out, scratch, block)
}

fn sub_tree(
    be: &mut dyn Backend,
    lo: usize,
    hi: usize,
    out: View,
    scratch: &[View],
    block: &mut dyn FnMut(&mut dyn Backend, usize, View) -> Result<(), BackendError>,
) -> Result<(), BackendError> {
    if hi - lo == 1 {
        return block(be, lo, out);
    }
    let mid = lo + (hi - lo) / 2;
    sub_tree(be, lo, mid, out, scratch, block)?;
    let (other, deeper) = scratch.split_first().expect("one scratch view a level");
    sub_tree(be, mid, hi, *other, deeper, block)?;
    be.run(Op::Add { src: *other, dst: out })
}
