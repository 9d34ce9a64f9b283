//! Context parallelism by gathered keys and values. Peers hold zigzag pieces of a sequence; keys and values are gathered and
//! put into the order of positions, so that a query row meets the same keys in the same order under every degree.

use super::{Machine, StepError};
use crate::backend::{Accumulate, Buffers, Heads, Lifetime, Op, View};
use crate::comm::{Reduce, Site};
use mesh::DType;

/// The keys and values of whole sequences, and the way there and back.
pub(crate) struct GatheredKv {
    /// Own keys and values, `[M, G·2·d]`.
    own: View,
    /// In position order, `[B·T, G·2·d]`; `own` itself without context parallelism.
    pub in_order: View,
    /// Gradients of `in_order`, accumulators.
    pub d_in_order: View,
    /// Gradients of `own`, summed over the peers, accumulators; and as F32.
    d_own_sum: View,
    d_own: View,
    exchange: Option<Exchange>,
}

/// Buffers that only more than one peer needs.
struct Exchange {
    /// Members' rows one after another, `[C·M, G·2·d]`.
    gathered: View,
    d_gathered: View,
    /// For each row in position order, its row in `gathered`; and the inverse.
    to_order: View,
    from_order: View,
    to_order_rows: Vec<i32>,
    from_order_rows: Vec<i32>,
}

impl GatheredKv {
    /// Buffers for `batch` samples, of which each of `cp` peers holds the positions `held[peer]`; `cols`: G·2·d. Keys and
    /// values are of `dtype`, their gradients are added by `add`.
    pub(crate) fn new(
        buffers: &mut Buffers,
        batch: usize,
        held: &[Vec<u64>],
        cols: usize,
        dtype: DType,
        add: Accumulate,
    ) -> Self {
        let cp = held.len();
        let local = held[0].len();
        let seq = cp * local;
        let mut declare = |name: &str, dtype, rows, cols| {
            buffers.declare(format!("kv.{name}"), Lifetime::Transient, dtype, rows, cols)
        };
        let own = declare("own", dtype, batch * local, cols);
        let d_in_order = declare("d_in_order", add.dtype(), batch * seq, cols);
        let d_own_sum = match cp {
            1 => d_in_order,
            _ => declare("d_own_sum", add.dtype(), batch * local, cols),
        };
        let d_own = match add {
            Accumulate::Fixed { .. } => declare("d_own", DType::F32, batch * local, cols),
            Accumulate::Float => d_own_sum,
        };
        if cp == 1 {
            return GatheredKv { own, in_order: own, d_in_order, d_own_sum, d_own, exchange: None };
        }
        let mut to_order_rows = vec![0; batch * seq];
        let mut from_order_rows = vec![0; batch * seq];
        for (peer, positions) in held.iter().enumerate() {
            for sample in 0..batch {
                for (at, position) in positions.iter().enumerate() {
                    let gathered = (peer * batch + sample) * local + at;
                    let ordered = sample * seq + *position as usize;
                    to_order_rows[ordered] = gathered as i32;
                    from_order_rows[gathered] = ordered as i32;
                }
            }
        }
        GatheredKv {
            own,
            in_order: declare("in_order", dtype, batch * seq, cols),
            d_in_order,
            d_own_sum,
            d_own,
            exchange: Some(Exchange {
                gathered: declare("gathered", dtype, batch * seq, cols),
                d_gathered: declare("d_gathered", add.dtype(), batch * seq, cols),
                to_order: declare("to_order", DType::I32, batch * seq, 1),
                from_order: declare("from_order", DType::I32, batch * seq, 1),
                to_order_rows,
                from_order_rows,
            }),
        }
    }

    /// Uploads the row orders; once a micro-batch.
    pub(crate) fn upload(&self, machine: &mut Machine) -> Result<(), StepError> {
        if let Some(exchange) = &self.exchange {
            machine.be.upload(exchange.to_order, bytemuck::cast_slice(&exchange.to_order_rows))?;
            machine.be.upload(exchange.from_order, bytemuck::cast_slice(&exchange.from_order_rows))?;
        }
        Ok(())
    }

    /// Fills `in_order` from the key and value heads of `qkv`.
    pub(crate) fn gather(
        &self,
        machine: &mut Machine,
        site: Site,
        qkv: View,
        heads: Heads,
    ) -> Result<(), StepError> {
        machine.run(Op::PackKv { qkv, kv: self.own, heads })?;
        if let Some(exchange) = &self.exchange {
            let ticket = machine.comms.cp.all_gather(machine.be, site, self.own, exchange.gathered)?;
            machine.comms.cp.wait(machine.be, ticket)?;
            machine.run(Op::GatherRows {
                src: exchange.gathered,
                index: exchange.to_order,
                dst: self.in_order,
            })?;
        }
        Ok(())
    }

    /// Sums `d_in_order` over the peers and puts this rank's part into the key and value columns of `d_qkv`.
    pub(crate) fn scatter_grad(
        &self,
        machine: &mut Machine,
        d_qkv: View,
        heads: Heads,
        add: Accumulate,
    ) -> Result<(), StepError> {
        if let Some(exchange) = &self.exchange {
            machine.run(Op::GatherRows {
                src: self.d_in_order,
                index: exchange.from_order,
                dst: exchange.d_gathered,
            })?;
            let ticket = machine.comms.cp.reduce_scatter(
                machine.be,
                "attention.scatter_kv_grad",
                Reduce::of_accumulators(add.dtype()),
                exchange.d_gathered,
                self.d_own_sum,
            )?;
            machine.comms.cp.wait(machine.be, ticket)?;
        }
        if let Accumulate::Fixed { bits, .. } = add {
            machine.run(Op::FxTake { acc: self.d_own_sum, bits, out: self.d_own })?;
        }
        Ok(machine.run(Op::UnpackKv { d_kv: self.d_own, d_qkv, heads })?)
    }
}
