//! Assembles rows from the values of their leaves.

use serde_json::{Map, Value};

use super::leaf::{LeafValues, Values};
use super::schema::{Column, Node, Shape};

/// Why a row cannot be assembled.
#[derive(Debug)]
pub(super) enum Reason {
    TooLong,
    NotUtf8,
    /// One column has lists, rows or nulls where another of the same list has none.
    ColumnsDisagree,
}

/// The next row. A number that JSON does not have, such as NaN, becomes null. Null fields of a nested group are omitted: such a
/// group has a field for every key that any row has there.
pub(super) fn next(
    columns: &[Column],
    leaves: &mut [LeafValues],
    limit_bytes: u64,
) -> Result<Map<String, Value>, Reason> {
    let mut row = Row { leaves, left_bytes: limit_bytes };
    columns.iter().map(|column| Ok((column.name.clone(), row.value(&column.node, 0)?))).collect()
}

struct Row<'leaves> {
    leaves: &'leaves mut [LeafValues],
    left_bytes: u64,
}

impl Row<'_> {
    /// A value nested in `groups` groups.
    fn value(&mut self, node: &Node, groups: usize) -> Result<Value, Reason> {
        let (definition, _) = self.leaves[node.first_leaf].peek().ok_or(Reason::ColumnsDisagree)?;
        if definition < node.present_from {
            self.skip(node)?;
            return Ok(Value::Null);
        }
        match &node.shape {
            Shape::Leaf { is_unsigned } => self.leaf(node.first_leaf, *is_unsigned),
            Shape::Group(fields) => {
                let mut present = Map::new();
                for (name, node) in fields {
                    let value = self.value(node, groups + 1)?;
                    if groups == 0 || !value.is_null() {
                        present.insert(name.clone(), value);
                    }
                }
                Ok(Value::Object(present))
            }
            Shape::List { filled_from, .. } if definition < *filled_from => {
                self.skip(node)?;
                Ok(Value::Array(Vec::new()))
            }
            Shape::List { repetition, element, .. } => {
                let mut elements = vec![self.value(element, groups)?];
                while self.leaves[node.first_leaf].peek().is_some_and(|(_, found)| found == *repetition) {
                    elements.push(self.value(element, groups)?);
                }
                Ok(Value::Array(elements))
            }
        }
    }

    /// Skips a null or an empty list, for which each leaf below has one level.
    fn skip(&mut self, node: &Node) -> Result<(), Reason> {
        for leaf in &mut self.leaves[node.first_leaf..node.first_leaf + node.leaf_count] {
            match leaf.take() {
                Some(None) => {}
                _ => return Err(Reason::ColumnsDisagree),
            }
        }
        Ok(())
    }

    fn leaf(&mut self, leaf: usize, is_unsigned: bool) -> Result<Value, Reason> {
        let leaf = &mut self.leaves[leaf];
        let place = leaf.take().flatten().ok_or(Reason::ColumnsDisagree)?;
        // A value's own size counts, so that a list of a billion numbers is too long as well.
        let size_bytes = match leaf.values() {
            Values::Bytes(values) => values.get(place).map_or(0, |text| text.len() as u64),
            _ => 0,
        };
        let size_bytes = size_bytes + size_of::<Value>() as u64;
        self.left_bytes = self.left_bytes.checked_sub(size_bytes).ok_or(Reason::TooLong)?;
        let value = match leaf.values() {
            Values::Booleans(values) => values.get(place).map(|&value| Value::Bool(value)),
            Values::Integers(values) if is_unsigned => values.get(place).map(|&value| (value as u32).into()),
            Values::Integers(values) => values.get(place).map(|&value| value.into()),
            Values::LongIntegers(values) if is_unsigned => values.get(place).map(|&value| (value as u64).into()),
            Values::LongIntegers(values) => values.get(place).map(|&value| value.into()),
            Values::Floats(values) => values.get(place).map(|&value| value.into()),
            Values::Doubles(values) => values.get(place).map(|&value| value.into()),
            Values::Bytes(values) => match values.get(place) {
                Some(bytes) => Some(str::from_utf8(bytes.data()).map_err(|_| Reason::NotUtf8)?.into()),
                None => None,
            },
        };
        value.ok_or(Reason::ColumnsDisagree)
    }
}
