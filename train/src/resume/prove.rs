//! The proof that memory holds what the checkpoint says.

use crate::comm::CommError;
use crate::resume::{Resume, ResumeError};
use crate::state::{RunState, Streams};
use crate::step::Trainer;
use ckpt::{CHUNK_BYTES_MAX, Fingerprint, OwnShard};
use mesh::ReplicaId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What one rank holds of a replica of a tensor.
#[derive(Serialize, Deserialize)]
struct Part {
    entry: usize,
    replica: ReplicaId,
    fingerprint: Fingerprint,
}

/// Recomputes every fingerprint from what is in memory now, a chunk's worth at a time, and compares it with the checkpoint's:
/// for each replica of each tensor, the sum over the ranks that hold it.
pub(super) fn prove(
    resume: &Resume,
    trainer: &mut Trainer,
    state: &RunState,
    streams: &Streams,
    own: &[OwnShard],
) -> Result<(), ResumeError> {
    let catalog = resume.source.catalog();
    let mut parts = Vec::new();
    let mut bytes = Vec::new();
    let (_, be) = trainer.parts();
    for OwnShard { entry, shard, local } in own {
        let element_bytes = shard.dtype.size_bytes();
        let mut fingerprint = Fingerprint::default();
        for piece in local.split(CHUNK_BYTES_MAX / element_bytes as u64) {
            bytes.resize(piece.numel() as usize * element_bytes, 0);
            state.read(be, streams, *entry, &piece, &mut bytes).map_err(CommError::from)?;
            let region = piece.relative_to(local).shifted_by(shard.region.lo());
            fingerprint +=
                Fingerprint::of_region(&shard.key, shard.dtype, &shard.global_shape, &region, &bytes);
        }
        parts.push(Part { entry: *entry, replica: shard.replica, fingerprint });
    }
    let mine = serde_json::to_vec(&parts).expect("numbers");
    let mut sums: BTreeMap<(usize, ReplicaId), Fingerprint> = BTreeMap::new();
    for theirs in trainer.comms().tp_dp_cp.gather_bytes("load.fingerprints", &mine)? {
        let parts: Vec<Part> = serde_json::from_slice(&theirs).expect("what a rank of this program wrote");
        for Part { entry, replica, fingerprint } in parts {
            *sums.entry((entry, replica)).or_default() += fingerprint;
        }
    }
    for ((entry, replica), found) in sums {
        let key = &state.table().entries()[entry].key;
        let Some(stored) = catalog.tensor(key) else { continue };
        if found != stored.fingerprint {
            let ReplicaId { tp, gtp, dp, .. } = replica;
            let (key, replica) = (key.clone(), format!("tp {tp} gtp {gtp} dp {dp}"));
            return Err(ResumeError::Fingerprint { key, found, expected: stored.fingerprint, replica });
        }
    }
    Ok(())
}
