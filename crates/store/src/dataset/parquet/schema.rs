//! The columns to read, and how their leaves form values.

use parquet::basic::{ConvertedType, LogicalType, Repetition, Type as Physical};
use parquet::schema::types::{SchemaDescriptor, Type};

use crate::Defect;
use crate::error::printable;

/// A top-level column.
#[derive(Debug)]
pub(super) struct Column {
    pub name: String,
    pub node: Node,
    /// The indices of its leaves among those of the file.
    leaves: Vec<usize>,
}

/// A value; not null from a definition level on.
#[derive(Debug)]
pub(super) struct Node {
    pub present_from: i16,
    pub shape: Shape,
    /// The first leaf below, counted among those of all columns read, and their number.
    pub first_leaf: usize,
    pub leaf_count: usize,
}

#[derive(Debug)]
pub(super) enum Shape {
    Leaf {
        is_unsigned: bool,
    },
    Group(Vec<(String, Node)>),
    /// It has elements from a definition level on; those after the first have its repetition level.
    List {
        filled_from: i16,
        repetition: i16,
        element: Box<Node>,
    },
}

impl Column {
    pub fn leaves(&self) -> impl Iterator<Item = &usize> {
        self.leaves.iter()
    }
}

/// The columns of these names and the optional ones that exist, or all columns. Recursion is bounded, because deep schemas are
/// refused before.
pub(super) fn choose(schema: &SchemaDescriptor, names: &[String], optional: &[String]) -> Result<Vec<Column>, Defect> {
    let fields = schema.root_schema().get_fields();
    let all: Vec<String> = fields.iter().map(|field| field.name().to_owned()).collect();
    let present = optional.iter().filter(|name| all.contains(name) && !names.contains(name));
    let wanted: Vec<&String> =
        if names.is_empty() { all.iter().collect() } else { names.iter().chain(present).collect() };
    let mut columns = Vec::new();
    let mut leaves_before = 0;
    for name in wanted {
        let Some(place) = all.iter().position(|present| present == name) else {
            return Err(Defect::NoSuchColumn { column: name.clone(), present: printable(&all.join(", ")) });
        };
        let first = fields[..place].iter().map(|field| count_leaves(field)).sum();
        let mut builder = Builder { leaves: leaves_before };
        let node = builder.field(&fields[place], Levels::default());
        let node = node.map_err(|found| Defect::ColumnType { column: printable(name), found })?;
        let leaf_count = builder.leaves - leaves_before;
        columns.push(Column { name: name.clone(), node, leaves: (first..first + leaf_count).collect() });
        leaves_before = builder.leaves;
    }
    Ok(columns)
}

fn count_leaves(field: &Type) -> usize {
    if field.is_primitive() { 1 } else { field.get_fields().iter().map(|field| count_leaves(field)).sum() }
}

#[derive(Clone, Copy, Default)]
struct Levels {
    definition: i16,
    repetition: i16,
}

/// Numbers the leaves while it descends. Its errors name the type found.
struct Builder {
    leaves: usize,
}

impl Builder {
    fn field(&mut self, field: &Type, levels: Levels) -> Result<Node, String> {
        match repetition(field) {
            Repetition::REQUIRED => self.value(field, levels),
            Repetition::OPTIONAL => self.value(field, Levels { definition: levels.definition + 1, ..levels }),
            // A list of the oldest kind, never null.
            Repetition::REPEATED => self.list(field, levels, levels.definition),
        }
    }

    /// A value of a type, without regard to its repetition.
    fn value(&mut self, field: &Type, levels: Levels) -> Result<Node, String> {
        if field.is_primitive() {
            return self.leaf(field, levels);
        }
        match (field.get_basic_info().converted_type(), field.get_fields()) {
            (ConvertedType::LIST, [repeated]) if repetition(repeated) == Repetition::REPEATED => {
                self.list(repeated, levels, levels.definition)
            }
            (ConvertedType::NONE, fields) => {
                let first_leaf = self.leaves;
                let node = |field: &std::sync::Arc<Type>| Ok((field.name().to_owned(), self.field(field, levels)?));
                let nodes: Vec<(String, Node)> = fields.iter().map(node).collect::<Result<_, String>>()?;
                if nodes.is_empty() {
                    return Err("an empty group".to_owned());
                }
                Ok(self.node(first_leaf, levels, Shape::Group(nodes)))
            }
            (kind, _) => Err(format!("a {kind}")),
        }
    }

    /// `present_from` is the list's own; its elements are a level deeper.
    fn list(&mut self, repeated: &Type, levels: Levels, present_from: i16) -> Result<Node, String> {
        let first_leaf = self.leaves;
        let inner = Levels { definition: levels.definition + 1, repetition: levels.repetition + 1 };
        // The format's rules for older writers: the repeated thing is the element itself, unless it is a group that
        // only wraps one.
        let element = match repeated {
            Type::GroupType { fields, .. } if fields.len() == 1 && !is_old_element(repeated.name()) => {
                self.field(&fields[0], inner)?
            }
            _ => self.value(repeated, inner)?,
        };
        let shape =
            Shape::List { filled_from: inner.definition, repetition: inner.repetition, element: Box::new(element) };
        Ok(self.node(first_leaf, Levels { definition: present_from, ..levels }, shape))
    }

    fn leaf(&mut self, field: &Type, levels: Levels) -> Result<Node, String> {
        let is_unsigned = check_leaf(field)?;
        let first_leaf = self.leaves;
        self.leaves += 1;
        Ok(self.node(first_leaf, levels, Shape::Leaf { is_unsigned }))
    }

    fn node(&self, first_leaf: usize, levels: Levels, shape: Shape) -> Node {
        Node { present_from: levels.definition, shape, first_leaf, leaf_count: self.leaves - first_leaf }
    }
}

fn repetition(field: &Type) -> Repetition {
    let info = field.get_basic_info();
    if info.has_repetition() { info.repetition() } else { Repetition::REQUIRED }
}

fn is_old_element(name: &str) -> bool {
    name == "array" || name.ends_with("_tuple")
}

/// Whether a supported leaf is of unsigned integers.
fn check_leaf(field: &Type) -> Result<bool, String> {
    let info = field.get_basic_info();
    let physical = field.get_physical_type();
    let logical = info.logical_type_ref();
    let is_number = matches!(logical, None | Some(LogicalType::Integer { .. }));
    match (physical, info.converted_type()) {
        (Physical::BOOLEAN | Physical::FLOAT | Physical::DOUBLE, _) => Ok(false),
        // Older writers leave text without a mark; if it is not UTF-8 after all, its row is refused.
        (
            Physical::BYTE_ARRAY,
            ConvertedType::UTF8 | ConvertedType::ENUM | ConvertedType::JSON | ConvertedType::NONE,
        ) if matches!(logical, None | Some(LogicalType::String | LogicalType::Enum | LogicalType::Json)) => Ok(false),
        (Physical::INT32 | Physical::INT64, ConvertedType::UINT_8 | ConvertedType::UINT_16)
        | (Physical::INT32 | Physical::INT64, ConvertedType::UINT_32 | ConvertedType::UINT_64)
            if is_number =>
        {
            Ok(true)
        }
        (Physical::INT32 | Physical::INT64, ConvertedType::INT_8 | ConvertedType::INT_16)
        | (Physical::INT32 | Physical::INT64, ConvertedType::INT_32 | ConvertedType::INT_64 | ConvertedType::NONE)
            if is_number =>
        {
            Ok(false)
        }
        (physical, ConvertedType::NONE) => Err(match logical {
            Some(logical) => format!("{physical} of {logical:?}"),
            None => physical.to_string(),
        }),
        (physical, kind) => Err(format!("{physical} of {kind}")),
    }
}
