//! Migration: a shard keeps the slices of one layout, its home, and computes with those of another, its work. Values that it
//! computes with and does not keep come from the shards that keep them, and their gradients go back there.

use std::collections::{BTreeMap, BTreeSet};

use evenkeel_device::DType;

use crate::chain::model::Model;
use crate::chain::unit::Sublayer;
use crate::parameters::ParamId;
use crate::sharding::layout::{Region, Slice};

/// Parameters that migrate to and from one shard: by unit, in the order of the chain, those that some shard computes with and
/// does not keep.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Migration {
    pub units: BTreeMap<usize, Vec<MigratedParam>>,
}

/// One parameter of a shard that computes with another part of it than it keeps, or whose part others compute with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MigratedParam {
    pub id: ParamId,
    pub is_vector: bool,
    /// Whether gradients go back.
    pub is_trained: bool,
    /// Rows and columns that this shard computes with.
    pub matrix: [usize; 2],
    /// The part it computes with as a region of the part it keeps, if it is one.
    pub own: Option<Region>,
    /// Regions that it keeps, each with the shard that computes with it, itself included.
    pub home_parts: Vec<(usize, Region)>,
    /// Regions that it computes with, each with the shard that keeps it, itself included. Both shards list the regions that go
    /// from one to the other in the same order.
    pub work_parts: Vec<(usize, Region)>,
    /// Whether several shards compute with the same elements, so that their gradients are to be added.
    pub is_summed: bool,
}

impl MigratedParam {
    /// A parameter on shard `me`, from the slices that all shards keep (`home`) and compute with (`work`).
    pub fn new(id: ParamId, is_vector: bool, home: &[&Slice], work: &[&Slice], me: usize) -> MigratedParam {
        let with = |shard: usize, overlaps: Vec<[Region; 2]>, side: usize| -> Vec<(usize, Region)> {
            overlaps.into_iter().map(|pair| (shard, pair[side].clone())).collect()
        };
        let home_parts: Vec<(usize, Region)> =
            (0..work.len()).flat_map(|shard| with(shard, home[me].overlaps(work[shard]), 0)).collect();
        let work_parts = (0..home.len()).flat_map(|shard| with(shard, home[shard].overlaps(work[me]), 1)).collect();
        let meets_earlier = |(index, (_, region)): (usize, &(usize, Region))| {
            home_parts[..index].iter().any(|(_, earlier)| earlier.meets(region))
        };
        let is_summed = home_parts.iter().enumerate().any(meets_earlier);
        MigratedParam {
            id,
            is_vector,
            is_trained: true,
            matrix: work[me].dims(),
            own: work[me].within(home[me]),
            home_parts,
            work_parts,
            is_summed,
        }
    }

    /// The region of the kept gradients in which gradients can be added up, if no other shard has summands of them: those would
    /// have to be added in the order of the shards.
    pub fn gradient_in_place(&self) -> Option<&Region> {
        self.own.as_ref().filter(|_| !self.is_summed)
    }

    /// Elements that shard `me` sends to others and receives from them when values migrate; gradients return the other way round.
    fn travelling(&self, me: usize) -> [usize; 2] {
        [&self.home_parts, &self.work_parts]
            .map(|parts| parts.iter().filter(|(shard, _)| *shard != me).map(|(_, region)| region.len()).sum())
    }
}

impl Migration {
    /// The migration of each shard when all keep the slices of one cut of a model and compute with those of another.
    pub fn all(home: &[Model], work: &[Model]) -> Vec<Migration> {
        check(home, work);
        let mut all = vec![Migration::default(); home.len()];
        for (place, unit) in home[0].units.iter().enumerate() {
            let Sublayer::Body(body) = &unit.sublayer else { continue };
            let ids: BTreeSet<ParamId> = body.parameters().into_iter().collect();
            for id in ids.into_iter().filter(|id| is_moved(home, work, *id)) {
                let slices = |models: &'_ [Model]| -> Vec<Slice> {
                    models.iter().map(|model| model.specs[id.0].slice.clone()).collect()
                };
                let (home_slices, work_slices) = (slices(home), slices(work));
                let (kept, used): (Vec<&Slice>, Vec<&Slice>) =
                    (home_slices.iter().collect(), work_slices.iter().collect());
                let spec = &home[0].specs[id.0];
                let (is_vector, is_trained) = (spec.is_vector(), spec.is_trained);
                for (me, migration) in all.iter_mut().enumerate() {
                    let migrated = MigratedParam { is_trained, ..MigratedParam::new(id, is_vector, &kept, &used, me) };
                    migration.units.entry(place).or_default().push(migrated);
                }
            }
        }
        all
    }

    /// Whether nothing moves: shards keep what they compute with.
    pub fn is_empty(&self) -> bool {
        self.units.is_empty()
    }

    /// The bytes of a unit's values that travel when it migrates, and those of its gradients when they return: the most
    /// in one direction, to or from shard `me`.
    pub fn bytes(&self, unit: usize, me: usize, dtype: DType) -> [u64; 2] {
        let most = |size: &dyn Fn(&MigratedParam) -> usize| -> u64 {
            let migrations = self.units[&unit].iter();
            let [sent, received] = migrations.fold([0, 0], |[sent, received], migrated| {
                let elements = migrated.travelling(me);
                [sent + elements[0] * size(migrated), received + elements[1] * size(migrated)]
            });
            sent.max(received) as u64
        };
        let value = |migrated: &MigratedParam| if migrated.is_vector { DType::F32 } else { dtype }.size_bytes();
        let gradient = |migrated: &MigratedParam| if migrated.is_trained { DType::F32.size_bytes() } else { 0 };
        [most(&value), most(&gradient)]
    }
}

fn is_moved(home: &[Model], work: &[Model], id: ParamId) -> bool {
    home.iter().zip(work).any(|(home, work)| home.specs[id.0].slice != work.specs[id.0].slice)
}

/// A failure is a bug of the code that chose the layouts.
fn check(home: &[Model], work: &[Model]) {
    let (shards, config) = (home.len(), &home[0].config);
    assert_eq!(shards, work.len(), "shards that keep parameters, and that compute with them");
    assert!(
        config.kv_heads >= shards,
        "{} key and value heads over {shards} shards: a head that several shards hold cannot migrate",
        config.kv_heads
    );
    for (home, work) in home.iter().zip(work).map(|(home, work)| (&home.shard, &work.shard)) {
        assert!(home.uncut.is_empty(), "what every shard holds whole cannot migrate: {:?}", home.uncut);
        assert_eq!(
            (&home.classes, &home.inputs, home.split_sequence, &home.uncut, home.experts.is_some()),
            (&work.classes, &work.inputs, work.split_sequence, &work.uncut, work.experts.is_some()),
            "shard {}: only heads, FFN columns and experts migrate",
            home.index
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use evenkeel_widths::{Dim, SHARES};

    use crate::sharding::shard::{Cut, Shard, widths_of};

    fn rows(bounds: &[usize], cols: usize) -> Vec<Slice> {
        bounds.windows(2).map(|pair| Slice::of_rows(pair[0]..pair[1], cols)).collect()
    }

    #[test]
    fn what_leaves_one_home_comes_to_work_in_the_same_order_and_every_element_returns() {
        for (home, work) in [
            (rows(&[0, 4, 8], 3), rows(&[0, 2, 8], 3)),
            (rows(&[0, 4, 8, 12], 3), rows(&[0, 0, 9, 12], 3)),
            (rows(&[0, 8, 8, 12], 3), rows(&[0, 3, 6, 12], 3)),
            // All three compute with rows of the middle one, and two of them with the same rows.
            (rows(&[0, 4, 8, 12], 3), [0..5, 4..6, 5..12].map(|rows| Slice::of_rows(rows, 3)).to_vec()),
        ] {
            let (kept, used): (Vec<&Slice>, Vec<&Slice>) = (home.iter().collect(), work.iter().collect());
            let migrations: Vec<MigratedParam> =
                (0..home.len()).map(|me| MigratedParam::new(ParamId(0), false, &kept, &used, me)).collect();
            for (me, migrated) in migrations.iter().enumerate() {
                let of = |parts: &[(usize, Region)], shard: usize| -> Vec<[usize; 2]> {
                    let parts = parts.iter().filter(|(other, _)| *other == shard);
                    parts.map(|(_, region)| [region.rows.len(), region.cols.len()]).collect()
                };
                for (other, theirs) in migrations.iter().enumerate() {
                    assert_eq!(
                        of(&migrated.home_parts, other),
                        of(&theirs.work_parts, me),
                        "{me} to {other}: {migrations:?}"
                    );
                }
                let elements = |parts: &[(usize, Region)]| parts.iter().map(|(_, region)| region.len()).sum::<usize>();
                assert_eq!(elements(&migrated.work_parts), migrated.matrix[0] * migrated.matrix[1]);
                let [kept_rows, cols] = home[me].dims();
                assert_eq!(elements(&migrated.home_parts) > kept_rows * cols, migrated.is_summed, "{migrated:?}");
                assert!(elements(&migrated.home_parts) >= kept_rows * cols);
            }
        }
    }

    fn llama() -> Model {
        let config = serde_json::json!({
            "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
            "num_key_value_heads": 4, "intermediate_size": 48, "vocab_size": 64,
        });
        Model::from_json(&config).unwrap()
    }

    fn cut(head_groups: [usize; 2], ffn: [usize; 2]) -> Vec<Model> {
        let even = widths_of(&Shard::cut(&llama().config, &Cut::even(2)).unwrap());
        let head_shares = head_groups.map(|groups| groups * SHARES).to_vec();
        let widths = even.with(Dim::Heads, head_shares).with(Dim::Columns, ffn.to_vec());
        llama().cut(&Cut { widths: Some(widths), ..Cut::even(2) }).unwrap()
    }

    #[test]
    fn only_units_whose_widths_differ_migrate_and_only_what_moves_travels() {
        let home = cut([2, 2], [24, 24]);
        assert!(Migration::all(&home, &cut([2, 2], [24, 24])).iter().all(Migration::is_empty));
        for (work, units) in
            [(cut([2, 2], [16, 32]), vec![2]), (cut([1, 3], [24, 24]), vec![1]), (cut([0, 4], [0, 48]), vec![1, 2])]
        {
            let all = Migration::all(&home, &work);
            for (me, migration) in all.iter().enumerate() {
                assert_eq!(migration.units.keys().copied().collect::<Vec<_>>(), units);
                // Gate, up and down; or q, k, v and o of heads of 8.
                let columns = home[0].shard.ffn.len() - work[0].shard.ffn.len();
                let heads = home[0].shard.heads.len() - work[0].shard.heads.len();
                let expected = |unit| if unit == 2 { 3 * columns * 32 } else { 4 * heads * 8 * 32 } as u64;
                for &unit in &units {
                    assert_eq!(migration.bytes(unit, me, DType::Bf16), [2 * expected(unit), 4 * expected(unit)]);
                }
            }
            let own = |migrations: &Vec<MigratedParam>| {
                migrations.iter().map(|migrated| migrated.own.is_some()).collect::<Vec<_>>()
            };
            assert!(all[0].units.values().flat_map(own).all(|is_part| is_part), "the first uses what it keeps");
            assert!(!all[1].units.values().flat_map(own).any(|is_part| is_part), "the second has more than it keeps");
        }
    }
}
