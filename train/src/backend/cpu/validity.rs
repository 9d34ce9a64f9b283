//! Which transient buffers hold something.

use crate::backend::{MemoryPlan, View};
use std::sync::Arc;

#[derive(Debug)]
pub(super) struct Validity {
    plan: Arc<MemoryPlan>,
    valid: Vec<bool>,
}

impl Validity {
    pub(super) fn new(plan: &Arc<MemoryPlan>) -> Self {
        let valid = plan.slots().iter().map(|slot| slot.persistent).collect();
        Validity { plan: Arc::clone(plan), valid }
    }

    /// # Panics
    /// If the buffer holds nothing.
    pub(super) fn read(&self, view: View) {
        let name = &self.plan.slot(view.buf).name;
        assert!(
            self.valid[view.buf.0 as usize],
            "`{name}` is read but holds nothing: never written, or its place reused"
        );
    }

    /// Destroys the buffers that share the place. Says whether the buffer held nothing so far.
    pub(super) fn write(&mut self, view: View) -> bool {
        let first = !std::mem::replace(&mut self.valid[view.buf.0 as usize], true);
        if first {
            for other in &self.plan.slot(view.buf).shares_with {
                self.valid[other.0 as usize] = false;
            }
        }
        first
    }
}
