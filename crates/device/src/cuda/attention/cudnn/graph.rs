//! A graph of operations over tensors of four dimensions: sequences, heads, tokens, elements.

use cudarc::cudnn::sys;
use sys::cudnnBackendAttributeName_t as Name;
use sys::cudnnBackendDescriptorType_t as Kind;
pub(super) use sys::cudnnDataType_t as Data;
pub(super) use sys::cudnnPointwiseMode_t as Mode;
pub(super) use sys::cudnnReduceTensorOp_t as Reduction;

use super::descriptor::{Descriptor, Refusal};

pub(super) const F32: Data = Data::CUDNN_DATA_FLOAT;
pub(super) const BF16: Data = Data::CUDNN_DATA_BFLOAT16;
const I32: Data = Data::CUDNN_DATA_INT32;
const BOOL: Data = Data::CUDNN_DATA_BOOLEAN;

/// The alignment of every operand.
const ALIGNMENT_BYTES: i64 = 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    pub dims: [i64; 4],
    pub strides: [i64; 4],
}

impl Shape {
    /// One number, broadcast to other shapes.
    pub const SCALAR: Shape = Shape { dims: [1; 4], strides: [1; 4] };

    /// Without gaps, in the order of the dimensions.
    pub fn packed(dims: [i64; 4]) -> Shape {
        let [_, b, c, d] = dims;
        Shape { dims, strides: [b * c * d, c * d, d, 1] }
    }

    /// The last two dimensions swapped; nothing moves.
    pub fn transposed(self) -> Shape {
        let ([a, b, c, d], [e, f, g, h]) = (self.dims, self.strides);
        Shape { dims: [a, b, d, c], strides: [e, f, h, g] }
    }

    pub fn elements(&self) -> i64 {
        self.dims.iter().product()
    }
}

/// A tensor by its index in its graph's list. Its number for a plan is one more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Node(usize);

impl Node {
    pub fn id(self) -> i64 {
        self.0 as i64 + 1
    }
}

struct Tensor {
    descriptor: Descriptor,
    shape: Shape,
}

#[derive(Default)]
pub(super) struct Graph {
    tensors: Vec<Tensor>,
    operations: Vec<Descriptor>,
}

/// The memory of a tensor.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    /// In the GPU's memory.
    Memory,
    /// None: one kernel makes and uses it.
    Inside,
    /// In the host's memory, read when a plan is executed.
    Host,
}

impl Graph {
    /// An operand or a result.
    pub fn tensor(&mut self, data: Data, shape: Shape) -> Result<Node, Refusal> {
        self.add(data, shape, Place::Memory)
    }

    pub fn inside(&mut self, data: Data, shape: Shape) -> Result<Node, Refusal> {
        self.add(data, shape, Place::Inside)
    }

    /// An f32 that each execution is given.
    pub fn scalar(&mut self) -> Result<Node, Refusal> {
        self.add(F32, Shape::SCALAR, Place::Host)
    }

    fn add(&mut self, data: Data, shape: Shape, place: Place) -> Result<Node, Refusal> {
        let node = Node(self.tensors.len());
        let mut tensor = Descriptor::new(Kind::CUDNN_BACKEND_TENSOR_DESCRIPTOR)?;
        tensor.set_data_type(Name::CUDNN_ATTR_TENSOR_DATA_TYPE, data)?;
        tensor.set_integers(Name::CUDNN_ATTR_TENSOR_DIMENSIONS, &shape.dims)?;
        tensor.set_integers(Name::CUDNN_ATTR_TENSOR_STRIDES, &shape.strides)?;
        tensor.set_integers(Name::CUDNN_ATTR_TENSOR_UNIQUE_ID, &[node.id()])?;
        tensor.set_integers(Name::CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, &[ALIGNMENT_BYTES])?;
        match place {
            Place::Memory => {}
            Place::Inside => tensor.set_true(Name::CUDNN_ATTR_TENSOR_IS_VIRTUAL)?,
            Place::Host => tensor.set_true(Name::CUDNN_ATTR_TENSOR_IS_BY_VALUE)?,
        }
        self.tensors.push(Tensor { descriptor: tensor.finalize()?, shape });
        Ok(node)
    }

    pub fn shape(&self, node: Node) -> Shape {
        self.tensors[node.0].shape
    }

    fn attach(&self, operation: &mut Descriptor, name: Name, node: Node) -> Result<(), Refusal> {
        operation.set_descriptors(name, &[&self.tensors[node.0].descriptor])
    }

    pub fn matmul(&mut self, left: Node, right: Node, product: Node) -> Result<Node, Refusal> {
        let mut matmul = Descriptor::new(Kind::CUDNN_BACKEND_MATMUL_DESCRIPTOR)?;
        matmul.set_data_type(Name::CUDNN_ATTR_MATMUL_COMP_TYPE, F32)?;
        let matmul = matmul.finalize()?;
        let mut operation = Descriptor::new(Kind::CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR)?;
        self.attach(&mut operation, Name::CUDNN_ATTR_OPERATION_MATMUL_ADESC, left)?;
        self.attach(&mut operation, Name::CUDNN_ATTR_OPERATION_MATMUL_BDESC, right)?;
        self.attach(&mut operation, Name::CUDNN_ATTR_OPERATION_MATMUL_CDESC, product)?;
        operation.set_descriptors(Name::CUDNN_ATTR_OPERATION_MATMUL_DESC, &[&matmul])?;
        self.operations.push(operation.finalize()?);
        Ok(product)
    }

    /// f32 of the first operand's shape.
    pub fn pointwise(&mut self, mode: Mode, operands: &[Node]) -> Result<Node, Refusal> {
        let result = self.inside(F32, self.shape(operands[0]))?;
        self.pointwise_to(mode, operands, result)
    }

    pub fn pointwise_to(&mut self, mode: Mode, operands: &[Node], result: Node) -> Result<Node, Refusal> {
        self.pointwise_by(mode, F32, None, operands, result)
    }

    fn pointwise_by(
        &mut self,
        mode: Mode,
        compute: Data,
        axis: Option<i64>,
        operands: &[Node],
        result: Node,
    ) -> Result<Node, Refusal> {
        let mut pointwise = Descriptor::new(Kind::CUDNN_BACKEND_POINTWISE_DESCRIPTOR)?;
        pointwise.set_pointwise(mode)?;
        pointwise.set_data_type(Name::CUDNN_ATTR_POINTWISE_MATH_PREC, compute)?;
        if let Some(axis) = axis {
            pointwise.set_integers(Name::CUDNN_ATTR_POINTWISE_AXIS, &[axis])?;
        }
        let pointwise = pointwise.finalize()?;
        let mut operation = Descriptor::new(Kind::CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR)?;
        operation.set_descriptors(Name::CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, &[&pointwise])?;
        let names = [
            Name::CUDNN_ATTR_OPERATION_POINTWISE_XDESC,
            Name::CUDNN_ATTR_OPERATION_POINTWISE_BDESC,
            Name::CUDNN_ATTR_OPERATION_POINTWISE_TDESC,
        ];
        for (name, &operand) in names.into_iter().zip(operands) {
            self.attach(&mut operation, name, operand)?;
        }
        self.attach(&mut operation, Name::CUDNN_ATTR_OPERATION_POINTWISE_YDESC, result)?;
        operation.set_floats(Name::CUDNN_ATTR_OPERATION_POINTWISE_ALPHA1, &[1.0])?;
        operation.set_floats(Name::CUDNN_ATTR_OPERATION_POINTWISE_ALPHA2, &[1.0])?;
        self.operations.push(operation.finalize()?);
        Ok(result)
    }

    /// Each element's place along a dimension.
    pub fn index(&mut self, like: Node, axis: i64) -> Result<Node, Refusal> {
        let result = self.inside(I32, self.shape(like))?;
        self.pointwise_by(Mode::CUDNN_POINTWISE_GEN_INDEX, F32, Some(axis), &[like], result)
    }

    pub fn compare(&mut self, mode: Mode, left: Node, right: Node) -> Result<Node, Refusal> {
        let result = self.inside(BOOL, self.shape(left))?;
        self.pointwise_by(mode, BOOL, None, &[left, right], result)
    }

    pub fn reduce(&mut self, by: Reduction, from: Node, to: Node) -> Result<Node, Refusal> {
        let mut reduction = Descriptor::new(Kind::CUDNN_BACKEND_REDUCTION_DESCRIPTOR)?;
        reduction.set_data_type(Name::CUDNN_ATTR_REDUCTION_COMP_TYPE, F32)?;
        reduction.set_reduction(by)?;
        let reduction = reduction.finalize()?;
        let mut operation = Descriptor::new(Kind::CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR)?;
        operation.set_descriptors(Name::CUDNN_ATTR_OPERATION_REDUCTION_DESC, &[&reduction])?;
        self.attach(&mut operation, Name::CUDNN_ATTR_OPERATION_REDUCTION_XDESC, from)?;
        self.attach(&mut operation, Name::CUDNN_ATTR_OPERATION_REDUCTION_YDESC, to)?;
        self.operations.push(operation.finalize()?);
        Ok(to)
    }

    /// The same elements in the transposed shape.
    pub fn transposed(&mut self, from: Node, data: Data) -> Result<Node, Refusal> {
        let to = self.inside(data, self.shape(from).transposed())?;
        let mut operation = Descriptor::new(Kind::CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR)?;
        self.attach(&mut operation, Name::CUDNN_ATTR_OPERATION_RESHAPE_XDESC, from)?;
        self.attach(&mut operation, Name::CUDNN_ATTR_OPERATION_RESHAPE_YDESC, to)?;
        self.operations.push(operation.finalize()?);
        Ok(to)
    }

    /// The finished graph, for a GPU's handle if there is one.
    pub fn finish(self, handle: Option<sys::cudnnHandle_t>) -> Result<Descriptor, Refusal> {
        let mut graph = Descriptor::new(Kind::CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR)?;
        let operations: Vec<&Descriptor> = self.operations.iter().collect();
        graph.set_descriptors(Name::CUDNN_ATTR_OPERATIONGRAPH_OPS, &operations)?;
        if let Some(handle) = handle {
            graph.set_handle(Name::CUDNN_ATTR_OPERATIONGRAPH_HANDLE, handle)?;
        }
        graph.finalize()
    }
}
