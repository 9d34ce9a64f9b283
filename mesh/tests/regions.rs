//! Laws of boxes: runs, intersection, and the proof of a tiling against counting by brute force.

use mesh::{Region, Shape, TilingFault, prove_tiling};
use proptest::prelude::*;

/// Flat row-major index and coordinates of every element of a tensor.
fn elements(shape: &[u64]) -> Vec<(u64, Vec<u64>)> {
    let mut all = vec![vec![]];
    for extent in shape {
        let longer = |at: Vec<u64>| (0..*extent).map(move |last| [at.as_slice(), &[last]].concat());
        all = all.into_iter().flat_map(longer).collect();
    }
    all.into_iter().enumerate().map(|(flat, at)| (flat as u64, at)).collect()
}

fn holds(region: &Region, at: &[u64]) -> bool {
    at.iter().enumerate().all(|(dim, index)| region.range(dim).contains(index))
}

fn shape() -> impl Strategy<Value = Vec<u64>> {
    prop::collection::vec(0..5u64, 0..5)
}

/// A box with both corners in a tensor of `shape`.
fn region_in(shape: &[u64]) -> impl Strategy<Value = Region> + use<> {
    let ranges: Vec<_> = shape.iter().map(|extent| (0..=*extent, 0..=*extent)).collect();
    ranges.prop_map(|corners| {
        let (lo, hi): (Vec<u64>, Vec<u64>) = corners.into_iter().map(|(a, b)| (a.min(b), a.max(b))).unzip();
        Region::new(&lo, &hi)
    })
}

fn tensor_with_two_boxes() -> impl Strategy<Value = (Vec<u64>, Region, Region)> {
    shape().prop_flat_map(|shape| (Just(shape.clone()), region_in(&shape), region_in(&shape)))
}

/// Cuts a box in two, again and again, at random places: an irregular tiling, empty boxes included.
fn tiling() -> impl Strategy<Value = (Vec<u64>, Vec<Region>)> {
    let cuts = prop::collection::vec((any::<prop::sample::Index>(), 0..4usize, 0..5u64), 0..12);
    (prop::collection::vec(0..5u64, 0..4), cuts).prop_map(|(shape, cuts)| {
        let mut boxes = vec![Region::whole(&Shape::new(&shape))];
        for (which, dim, at) in cuts {
            if dim >= shape.len() {
                continue;
            }
            let region = boxes.swap_remove(which.index(boxes.len()));
            let at = at.clamp(region.lo()[dim], region.hi()[dim]);
            let (mut hi, mut lo) = (region.hi().to_vec(), region.lo().to_vec());
            hi[dim] = at;
            lo[dim] = at;
            boxes.push(Region::new(region.lo(), &hi));
            boxes.push(Region::new(&lo, region.hi()));
        }
        (shape, boxes)
    })
}

#[derive(Clone, Debug)]
enum Damage {
    None,
    Drop,
    Duplicate,
    Shift { dim: usize },
}

fn damage() -> impl Strategy<Value = Damage> {
    prop_oneof![
        Just(Damage::None),
        Just(Damage::Drop),
        Just(Damage::Duplicate),
        (0..3usize).prop_map(|dim| Damage::Shift { dim }),
    ]
}

proptest! {
    #[test]
    fn runs_are_the_elements_of_the_box_in_order((shape, region, _) in tensor_with_two_boxes()) {
        let expected: Vec<u64> =
            elements(&shape).into_iter().filter(|(_, at)| holds(&region, at)).map(|(flat, _)| flat).collect();
        let runs: Vec<_> = region.runs(&Shape::new(&shape)).collect();
        prop_assert_eq!(runs.iter().cloned().flatten().collect::<Vec<u64>>(), expected);
        prop_assert!(runs.windows(2).all(|pair| pair[0].end < pair[1].start), "not joined: {runs:?}");
    }

    #[test]
    fn the_pieces_of_a_box_tile_it_in_order_and_none_is_too_large(
        (_, region, _) in tensor_with_two_boxes(), numel_max in 1..40u64,
    ) {
        let pieces = region.split(numel_max);
        let inside: Vec<Region> = pieces.iter().map(|piece| piece.relative_to(&region)).collect();
        prop_assert_eq!(prove_tiling(&region.shape(), &inside.iter().collect::<Vec<_>>()), Ok(()));
        prop_assert!(pieces.iter().all(|piece| piece.numel() <= numel_max));
        prop_assert!(pieces.windows(2).all(|pair| pair[0].lo() < pair[1].lo()));
    }

    #[test]
    fn an_intersection_holds_what_both_boxes_hold((shape, a, b) in tensor_with_two_boxes()) {
        let both = a.intersect(&b);
        prop_assert_eq!(&both, &b.intersect(&a));
        for (_, at) in elements(&shape) {
            let in_both = both.as_ref().is_some_and(|both| holds(both, &at));
            prop_assert_eq!(in_both, holds(&a, &at) && holds(&b, &at), "{:?}", at);
        }
        if let Some(both) = both {
            prop_assert!(!both.is_empty() && a.contains(&both) && b.contains(&both));
            prop_assert_eq!(both.relative_to(&a).shifted_by(a.lo()), both);
        }
    }

    #[test]
    fn a_tiling_is_proved_or_its_fault_is_found(
        (shape, mut boxes) in tiling(),
        damage in damage(),
        which in any::<prop::sample::Index>(),
    ) {
        let which = which.index(boxes.len());
        match damage {
            Damage::None => {}
            Damage::Drop => {
                boxes.swap_remove(which);
            }
            Damage::Duplicate => boxes.push(boxes[which].clone()),
            Damage::Shift { dim } if dim < shape.len() => {
                let mut origin = vec![0; shape.len()];
                origin[dim] = 1;
                boxes[which] = boxes[which].shifted_by(&origin);
            }
            Damage::Shift { .. } => {}
        }
        let times = |at: &[u64]| boxes.iter().filter(|region| holds(region, at)).count();
        let all = elements(&shape);
        let outside = |region: &Region| {
            !region.is_empty() && (0..shape.len()).any(|dim| region.hi()[dim] > shape[dim])
        };
        let refs: Vec<&Region> = boxes.iter().collect();
        match prove_tiling(&Shape::new(&shape), &refs) {
            Ok(()) => {
                prop_assert!(!boxes.iter().any(outside));
                prop_assert!(all.iter().all(|(_, at)| times(at) == 1));
            }
            Err(TilingFault::Outside { index }) => prop_assert!(outside(&boxes[index])),
            Err(TilingFault::Overlap { first, second, overlap }) => {
                prop_assert!(first != second);
                prop_assert_eq!(boxes[first].intersect(&boxes[second]), Some(overlap));
            }
            Err(TilingFault::Uncovered { missing }) => {
                prop_assert!(!boxes.iter().any(outside));
                let uncovered = all.iter().filter(|(_, at)| times(at) == 0).count();
                prop_assert_eq!(uncovered as u64, missing);
                prop_assert!(missing > 0 && all.iter().all(|(_, at)| times(at) <= 1));
            }
        }
    }
}

#[test]
fn a_box_of_another_number_of_dims_lies_outside() {
    let line = Region::new(&[0], &[4]);
    assert_eq!(prove_tiling(&Shape::new(&[4, 1]), &[&line]), Err(TilingFault::Outside { index: 0 }));
}

#[test]
fn a_tiling_that_no_straight_cut_divides_is_proved_too() {
    let square = |rows: [u64; 2], cols: [u64; 2]| Region::new(&[rows[0], cols[0]], &[rows[1], cols[1]]);
    let pinwheel = [
        square([0, 1], [0, 2]),
        square([0, 2], [2, 3]),
        square([2, 3], [1, 3]),
        square([1, 3], [0, 1]),
        square([1, 2], [1, 2]),
    ];
    let mut boxes: Vec<&Region> = pinwheel.iter().collect();
    assert_eq!(prove_tiling(&Shape::new(&[3, 3]), &boxes), Ok(()));
    let longer = square([1, 2], [1, 3]);
    boxes[4] = &longer;
    let overlap = square([1, 2], [2, 3]);
    let fault = TilingFault::Overlap { first: 1, second: 4, overlap };
    assert_eq!(prove_tiling(&Shape::new(&[3, 3]), &boxes), Err(fault));
}

#[test]
fn a_scalar_is_one_element_in_one_box() {
    let scalar = Shape::new(&[]);
    let whole = Region::whole(&scalar);
    assert_eq!(prove_tiling(&scalar, &[&whole]), Ok(()));
    assert_eq!(prove_tiling(&scalar, &[]), Err(TilingFault::Uncovered { missing: 1 }));
    assert!(matches!(prove_tiling(&scalar, &[&whole, &whole]), Err(TilingFault::Overlap { .. })));
}

#[test]
fn a_box_inside_out_is_not_read() {
    let read = |text: &str| serde_json::from_str::<Region>(text);
    let region = Region::new(&[1, 2], &[3, 4]);
    assert_eq!(read(&serde_json::to_string(&region).unwrap()).unwrap(), region);
    assert!(read(r#"{"lo":[2],"hi":[1]}"#).is_err());
    assert!(read(r#"{"lo":[2],"hi":[3,4]}"#).is_err());
}
