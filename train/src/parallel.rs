//! What each parallel axis adds to the program, one axis a file, and the communicators it speaks through.

pub(crate) mod context;
pub(crate) mod replica;
pub(crate) mod tensor;
pub(crate) mod weight;

use crate::backend::{Backend, BackendError, Op};
use crate::comm::{Comm, CommError, Reduce};
use mesh::{GroupKind, MissingGroups, ProcessGroups};
use std::rc::Rc;
use weight::WeightStore;

/// The communicators of one model on one rank, made from its own process groups.
pub struct Comms {
    /// Tensor parallel peers.
    pub tp: Rc<dyn Comm>,
    /// Runtime context parallel peers.
    pub cp: Rc<dyn Comm>,
    /// Peers that share out a TP-local weight.
    pub gtp_remat: Rc<dyn Comm>,
    /// Weight replicas, which share out the optimizer.
    pub dp_cp: Rc<dyn Comm>,
    /// All ranks with other tokens at this TP coordinate.
    pub dp_cp_gtp_remat: Rc<dyn Comm>,
    /// All ranks of the model (of a stage).
    pub tp_dp_cp: Rc<dyn Comm>,
}

impl Comms {
    /// The groups that training needs; each must be in the collection.
    pub const NEEDED: &[GroupKind] = &[
        GroupKind::Tp,
        GroupKind::Cp,
        GroupKind::GtpRemat,
        GroupKind::DpCp,
        GroupKind::DpGtpRemat,
        GroupKind::DpCpGtpRemat,
        GroupKind::TpDpCp,
    ];

    /// Communicators for `groups`, each made by `make`.
    ///
    /// # Errors
    /// Names every group that the collection lacks.
    pub fn new(
        groups: &ProcessGroups,
        mut make: impl FnMut(GroupKind) -> Rc<dyn Comm>,
    ) -> Result<Self, MissingGroups> {
        groups.require("the trainer", Self::NEEDED)?;
        Ok(Comms {
            tp: make(GroupKind::Tp),
            cp: make(GroupKind::Cp),
            gtp_remat: make(GroupKind::GtpRemat),
            dp_cp: make(GroupKind::DpCp),
            dp_cp_gtp_remat: make(GroupKind::DpCpGtpRemat),
            tp_dp_cp: make(GroupKind::TpDpCp),
        })
    }
}

/// What a program runs on.
pub(crate) struct Machine<'a> {
    pub be: &'a mut dyn Backend,
    pub comms: &'a Comms,
    pub weights: &'a mut WeightStore,
    /// How sums over a TP-split dimension are combined.
    pub tp_sum: Reduce,
    /// Whether dropouts drop, as in training.
    pub drops: bool,
}

impl Machine<'_> {
    pub(crate) fn run(&mut self, op: Op) -> Result<(), BackendError> {
        self.be.run(op)
    }
}

/// A program did not run to its end.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    /// A collective failed.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// The device failed.
    #[error(transparent)]
    Backend(#[from] BackendError),
}

impl StepError {
    /// Code of the error.
    pub fn code(&self) -> &'static str {
        match self {
            StepError::Comm(error) => error.code(),
            StepError::Backend(error) => error.code(),
        }
    }

    /// How to mend it.
    pub fn help(&self) -> &'static str {
        match self {
            StepError::Comm(error) => error.help(),
            StepError::Backend(error) => error.help(),
        }
    }
}
