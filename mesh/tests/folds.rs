//! Folding CP into the weight group: translation both ways and its memory.

use mesh::{ConfiguredCp, Fold, FoldMemory, LayoutSizes, ParallelLayout};

fn layout(world_size: u32, cp: u32, gtp: u32, gtp_sequence_shards: u32) -> ParallelLayout {
    ParallelLayout::new(LayoutSizes {
        world_size,
        cp: ConfiguredCp(cp),
        gtp,
        gtp_sequence_shards,
        ..ParallelLayout::single().sizes()
    })
    .unwrap()
}

#[test]
fn sixty_four_pieces_of_a_sequence_in_a_weight_group_of_sixty_four() {
    // Weight shards 64 and sequence shards 64 here are CP 64 and GTP 1 there.
    let here = layout(64, 1, 64, 64);
    let fold = Fold::of(&here).unwrap();
    assert_eq!(fold, Fold { cp: 64, gtp: 1 });
    // 64 layers with two norms of 8192, f32 master and two moments: 12.6 MB a rank here, 0.2 MB there.
    let bytes = 64 * 2 * 8192 * 12;
    assert_eq!(fold.memory(&here, bytes), FoldMemory { here_bytes: 12_582_912, folded_bytes: 196_608 });
    // Two data parallel copies share it out in both forms.
    let two = layout(128, 1, 64, 64);
    let memory = Fold::of(&two).unwrap().memory(&two, bytes);
    assert_eq!(memory, FoldMemory { here_bytes: 6_291_456, folded_bytes: 98_304 });
}

#[test]
fn translation_is_its_own_inverse_where_there_is_one() {
    for cp in 1..=6 {
        for gtp in 1..=6 {
            let fold = Fold { cp, gtp };
            let sizes = LayoutSizes { world_size: 2 * cp * gtp, ..ParallelLayout::single().sizes() };
            let here = ParallelLayout::new(fold.sizes(sizes)).unwrap();
            assert_eq!(Fold::of(&here), Some(fold));
            assert_eq!((here.runtime_cp().0, here.gtp(), here.dp()), (cp, cp * gtp, 2));
            // Samples are the same, too: DP and what is left of GTP.
            assert_eq!(here.batch_parallel_size(), 2 * gtp);
        }
    }
    // CP beyond the weight group has no folded form.
    assert_eq!(Fold::of(&layout(8, 2, 4, 2)), None);
}
