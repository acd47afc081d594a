//! Every way a safetensors file can lie, each refused with its own defect.

mod forge;

use evenkeel_store::Defect;
use forge::{entry, file, file_announcing, header, open, zeros};

macro_rules! refused {
    ($($name:ident: $bytes:expr => $defect:pat,)*) => {$(
        #[test]
        fn $name() {
            let error = open($bytes).unwrap_err();
            assert!(matches!(error.defect, $defect), "{error:?}");
        }
    )*};
}

macro_rules! accepted {
    ($($name:ident: $bytes:expr => $names:expr,)*) => {$(
        #[test]
        fn $name() {
            let names: [&str; _] = $names;
            assert_eq!(open($bytes).unwrap().names().collect::<Vec<_>>(), names);
        }
    )*};
}

refused! {
    an_empty_file_is_refused: b"" => Defect::FileTooShort { found_bytes: 0 },
    a_file_shorter_than_its_length_field_is_refused: [2, 0, 0, 0, 0, 0, 0] => Defect::FileTooShort { found_bytes: 7 },
    a_git_lfs_pointer_is_named_as_one:
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n" => Defect::GitLfsPointer,
    a_web_page_saved_as_weights_is_refused: b"<!DOCTYPE html><html></html>" => Defect::HeaderTooLarge { .. },
    a_header_of_all_addressable_memory_is_refused:
        file_announcing(u64::MAX, b"{}", &[]) => Defect::HeaderTooLarge { found_bytes: u64::MAX },
    a_header_one_byte_over_the_limit_is_refused:
        file_announcing(100_000_001, b"{}", &[]) => Defect::HeaderTooLarge { .. },
    a_header_longer_than_the_file_is_refused:
        file_announcing(3, b"{}", &[]) => Defect::HeaderBeyondFile { header_bytes: 3, left_bytes: 2 },
    an_empty_header_is_refused: file("", &[]) => Defect::HeaderEmpty,
    a_header_that_starts_with_space_is_refused: file(" {}", &[]) => Defect::HeaderStart { found: b' ' },
    a_header_that_is_a_list_is_refused: file("[]", &[]) => Defect::HeaderStart { found: b'[' },
    a_header_that_is_not_utf8_is_refused:
        file_announcing(5, b"{\"\xff\":", &[]) => Defect::NotUtf8 { at: 2 },
    a_header_that_is_not_json_is_refused: file("{\"a\":}", &[]) => Defect::NotJson { .. },
    a_header_that_stops_early_is_refused: file("{\"a\":", &[]) => Defect::NotJson { .. },
    a_header_with_text_after_its_object_is_refused: file("{}{}", &[]) => Defect::NotJson { .. },
    a_header_nested_beyond_the_stack_is_refused:
        file(&format!("{{\"a\":{}", "[".repeat(100_000)), &[]) => Defect::NotJson { .. },

    a_tensor_without_shape_is_refused:
        file(r#"{"a":{"dtype":"U8","data_offsets":[0,0]}}"#, &[]) => Defect::WrongForm { .. },
    a_tensor_that_is_a_number_is_refused: file(r#"{"a":1}"#, &[]) => Defect::WrongForm { .. },
    a_negative_dim_is_refused:
        file(r#"{"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,0]}}"#, &[]) => Defect::WrongForm { .. },
    a_fractional_dim_is_refused:
        file(r#"{"a":{"dtype":"U8","shape":[1.5],"data_offsets":[0,1]}}"#, &[0]) => Defect::WrongForm { .. },
    a_dim_beyond_64_bits_is_refused:
        file(r#"{"a":{"dtype":"U8","shape":[18446744073709551616],"data_offsets":[0,0]}}"#, &[])
        => Defect::WrongForm { .. },
    three_offsets_are_refused:
        file(r#"{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0,0]}}"#, &[])
        => Defect::WrongForm { .. },
    metadata_that_is_not_text_is_refused: file(r#"{"__metadata__":{"step":1}}"#, &[]) => Defect::WrongForm { .. },

    two_tensors_of_one_name_are_refused:
        zeros(&[entry("a", "U8", &[1], 0, 1), entry("a", "U8", &[1], 0, 1)], 1) => Defect::DuplicateKey { .. },
    one_name_spelt_with_and_without_escapes_is_refused:
        zeros(&[entry("a", "U8", &[1], 0, 1), entry(r"\u0061", "U8", &[1], 0, 1)], 1) => Defect::DuplicateKey { .. },
    a_tensor_with_two_shapes_is_refused:
        file(r#"{"a":{"dtype":"U8","shape":[1],"shape":[0],"data_offsets":[0,0]}}"#, &[])
        => Defect::DuplicateKey { .. },
    metadata_with_one_key_twice_is_refused:
        file(r#"{"__metadata__":{"a":"1","a":"2"}}"#, &[]) => Defect::DuplicateKey { .. },
    metadata_given_twice_is_refused: file(r#"{"__metadata__":{},"__metadata__":{}}"#, &[]) => Defect::DuplicateKey { .. },

    a_tensor_without_a_name_is_refused: zeros(&[entry("", "U8", &[1], 0, 1)], 1) => Defect::TensorName { .. },
    a_tensor_name_of_a_megabyte_is_refused:
        zeros(&[entry(&"a".repeat(1 << 20), "U8", &[1], 0, 1)], 1) => Defect::TensorName { .. },
    a_tensor_name_that_drives_the_terminal_is_refused:
        zeros(&[entry(r"\u001b[2J", "U8", &[1], 0, 1)], 1) => Defect::TensorName { .. },
    an_unknown_dtype_is_refused: zeros(&[entry("a", "F7", &[1], 0, 1)], 1) => Defect::UnknownDtype { .. },
    a_dtype_of_half_a_byte_is_refused: zeros(&[entry("a", "F4", &[2], 0, 1)], 1) => Defect::UnknownDtype { .. },
    a_dtype_in_lower_case_is_refused: zeros(&[entry("a", "f32", &[1], 0, 4)], 4) => Defect::UnknownDtype { .. },
    nine_dims_are_refused: zeros(&[entry("a", "U8", &[1; 9], 0, 1)], 1) => Defect::TooManyDims { found: 9, .. },
    a_million_dims_are_refused: zeros(&[entry("a", "U8", &[1; 1_000_000], 0, 1)], 1) => Defect::TooManyDims { .. },
    more_tensors_than_the_limit_are_refused:
        file(&header(&(0..=262_144).map(|i| entry(&format!("{i}"), "U8", &[0], 0, 0)).collect::<Vec<_>>()), &[])
        => Defect::TooManyTensors { found: 262_145 },

    a_shape_that_overflows_is_refused:
        zeros(&[entry("a", "U8", &[1 << 32, 1 << 32], 0, 1)], 1) => Defect::SizeOverflow { .. },
    a_shape_that_overflows_once_counted_in_bytes_is_refused:
        zeros(&[entry("a", "F32", &[1 << 62], 0, 0)], 0) => Defect::SizeOverflow { .. },
    offsets_that_end_before_they_begin_are_refused:
        zeros(&[entry("a", "U8", &[1], 1, 0)], 1) => Defect::OffsetsReversed { begin: 1, end: 0, .. },
    a_tensor_that_ends_beyond_the_file_is_refused:
        zeros(&[entry("a", "U8", &[2], 0, 2)], 1) => Defect::TensorBeyondFile { end: 2, data_bytes: 1, .. },
    a_tensor_at_the_end_of_all_memory_is_refused:
        zeros(&[entry("a", "U8", &[1], usize::MAX - 1, usize::MAX)], 1) => Defect::TensorBeyondFile { .. },
    tensors_that_fill_all_addressable_memory_are_refused: sizes_of_all_memory() => Defect::TensorBeyondFile { .. },
    a_tensor_smaller_than_its_shape_is_refused:
        zeros(&[entry("a", "F32", &[2], 0, 4)], 4)
        => Defect::SizeMismatch { expected_bytes: 8, found_bytes: 4, .. },
    a_tensor_larger_than_its_shape_is_refused:
        zeros(&[entry("a", "F32", &[2], 0, 12)], 12)
        => Defect::SizeMismatch { expected_bytes: 8, found_bytes: 12, .. },
    a_scalar_without_bytes_is_refused:
        zeros(&[entry("a", "F32", &[], 0, 0)], 0) => Defect::SizeMismatch { expected_bytes: 4, found_bytes: 0, .. },

    tensors_that_share_all_bytes_are_refused:
        zeros(&[entry("a", "U8", &[2], 0, 2), entry("b", "U8", &[2], 0, 2)], 2) => Defect::Overlap { .. },
    tensors_that_share_one_byte_are_refused:
        zeros(&[entry("a", "U8", &[2], 0, 2), entry("b", "U8", &[2], 1, 3)], 3) => Defect::Overlap { .. },
    a_tensor_within_another_is_refused:
        zeros(&[entry("a", "U8", &[4], 0, 4), entry("b", "U8", &[1], 1, 2)], 4) => Defect::Overlap { .. },
    bytes_before_the_first_tensor_are_refused:
        zeros(&[entry("a", "U8", &[1], 1, 2)], 2) => Defect::Hole { begin: 1, previous_end: 0, .. },
    bytes_between_two_tensors_are_refused:
        zeros(&[entry("a", "U8", &[1], 0, 1), entry("b", "U8", &[1], 2, 3)], 3)
        => Defect::Hole { begin: 2, previous_end: 1, .. },
    an_empty_tensor_beyond_a_hole_is_refused:
        zeros(&[entry("a", "U8", &[1], 0, 1), entry("b", "U8", &[0], 2, 2)], 2) => Defect::Hole { .. },
    bytes_after_the_last_tensor_are_refused:
        zeros(&[entry("a", "U8", &[1], 0, 1)], 2) => Defect::TrailingBytes { end: 1, data_bytes: 2 },
    bytes_that_belong_to_no_tensor_at_all_are_refused:
        file("{}", &[0]) => Defect::TrailingBytes { end: 0, data_bytes: 1 },
}

accepted! {
    a_file_without_tensors_is_accepted: file("{}", &[]) => [],
    a_header_padded_with_spaces_is_accepted:
        file(&(header(&[entry("a", "U8", &[1], 0, 1)]) + "     "), &[0]) => ["a"],
    tensors_in_any_order_of_the_header_are_accepted:
        zeros(&[entry("b", "F32", &[1], 4, 8), entry("a", "U8", &[4], 0, 4)], 8) => ["a", "b"],
    empty_tensors_are_accepted_wherever_others_meet:
        zeros(&[entry("a", "U8", &[1], 0, 1), entry("b", "F32", &[3, 0], 1, 1), entry("c", "U8", &[1], 1, 2)], 2)
        => ["a", "b", "c"],
    a_tensor_at_an_odd_byte_is_accepted:
        zeros(&[entry("a", "U8", &[1], 0, 1), entry("b", "F64", &[], 1, 9)], 9) => ["a", "b"],
    metadata_of_null_is_accepted: file(r#"{"__metadata__":null}"#, &[]) => [],
    fields_of_later_versions_are_accepted:
        file(r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"device":"cpu"}}"#, &[0]) => ["a"],
}

/// Tensors in gapless order that end at the last address there is, where adding the header's length overflows.
fn sizes_of_all_memory() -> Vec<u8> {
    const STEP: usize = 1 << 60;
    let tensor = |i: usize, size: usize| entry(&format!("{i:02}"), "U8", &[size], i * STEP, i * STEP + size);
    let mut entries: Vec<String> = (0..15).map(|i| tensor(i, STEP)).collect();
    entries.push(tensor(15, STEP - 1));
    file(&header(&entries), &[])
}

#[test]
fn the_header_is_what_its_tensors_say() {
    let entries = [entry("b", "BF16", &[3, 1], 4, 10), entry("a", "I32", &[], 0, 4)];
    let metadata = r#""__metadata__":{"format":"pt"}"#.to_owned();
    let file = open(file(&header(&[metadata, entries[0].clone(), entries[1].clone()]), b"0123456789")).unwrap();
    assert_eq!(file.metadata()["format"], "pt");
    let tensor = file.tensor("b").unwrap();
    assert_eq!((tensor.name(), tensor.dtype().name(), tensor.shape()), ("b", "BF16", &[3, 1][..]));
    assert_eq!(tensor.bytes(), b"456789");
    assert_eq!(file.tensor("a").unwrap().bytes(), b"0123");
    assert!(file.tensor("c").is_none());
    assert!(file.tensor("__metadata__").is_none());
}
