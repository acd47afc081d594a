//! One PNG or JPEG as pixels.

use std::io::Cursor;

use zune_core::bytestream::ZCursor;
use zune_core::colorspace::ColorSpace;
use zune_core::options::DecoderOptions;
use zune_jpeg::JpegDecoder;

use super::guard::guarded;
use crate::error::printable;
use crate::{Defect, limits};

/// Width, height, and `[height, width, 3]` of red, green and blue.
type Picture = (usize, usize, Vec<u8>);

const PNG: &[u8] = b"\x89PNG\r\n\x1a\n";
const JPEG: &[u8] = b"\xff\xd8\xff";
const SIDE: usize = 1 << 16;

/// The first bytes decide the format, not the file's name. Transparency is dropped, grey becomes three equal colours.
pub(super) fn decode(bytes: &[u8]) -> Result<Picture, Defect> {
    if bytes.starts_with(PNG) {
        let (width, height) = guarded(|| Ok(png_reader(bytes)?.info().size())).map_err(not_an_image)?;
        check_size(width as usize, height as usize)?;
        guarded(|| decode_png(bytes)).map_err(not_an_image)
    } else if bytes.starts_with(JPEG) {
        let (width, height) = guarded(|| jpeg_size(&mut jpeg_decoder(bytes))).map_err(not_an_image)?;
        check_size(width, height)?;
        guarded(|| decode_jpeg(bytes)).map_err(not_an_image)
    } else {
        Err(not_an_image("it is neither PNG nor JPEG".to_owned()))
    }
}

fn not_an_image(detail: String) -> Defect {
    Defect::NotAnImage { detail: printable(&detail) }
}

fn check_size(width: usize, height: usize) -> Result<(), Defect> {
    match width.checked_mul(height) {
        Some(pixels) if pixels <= limits::IMAGE_PIXELS => Ok(()),
        _ => Err(Defect::ImageTooLarge { width, height }),
    }
}

fn png_reader(bytes: &[u8]) -> Result<png::Reader<Cursor<&[u8]>>, String> {
    // Four channels of the largest image, and a margin for the decoder itself.
    let limits = png::Limits { bytes: 4 * limits::IMAGE_PIXELS + (1 << 20) };
    let mut decoder = png::Decoder::new_with_limits(Cursor::new(bytes), limits);
    decoder.set_transformations(png::Transformations::normalize_to_color8());
    decoder.read_info().map_err(|error| error.to_string())
}

fn decode_png(bytes: &[u8]) -> Result<Picture, String> {
    let mut reader = png_reader(bytes)?;
    let size_bytes = reader.output_buffer_size().ok_or("it is too large")?;
    let mut pixels = vec![0; size_bytes];
    let frame = reader.next_frame(&mut pixels).map_err(|error| error.to_string())?;
    pixels.truncate(frame.buffer_size());
    let rgb = match frame.color_type {
        png::ColorType::Rgb => pixels,
        png::ColorType::Rgba => pixels.as_chunks::<4>().0.iter().flat_map(|&[r, g, b, _]| [r, g, b]).collect(),
        png::ColorType::Grayscale => pixels.iter().flat_map(|&grey| [grey; 3]).collect(),
        png::ColorType::GrayscaleAlpha => pixels.as_chunks::<2>().0.iter().flat_map(|&[grey, _]| [grey; 3]).collect(),
        png::ColorType::Indexed => return Err("its palette cannot be applied".to_owned()),
    };
    whole(frame.width as usize, frame.height as usize, rgb)
}

fn jpeg_decoder(bytes: &[u8]) -> JpegDecoder<ZCursor<&[u8]>> {
    let options =
        DecoderOptions::default().set_max_width(SIDE).set_max_height(SIDE).jpeg_set_out_colorspace(ColorSpace::RGB);
    JpegDecoder::new_with_options(ZCursor::new(bytes), options)
}

fn jpeg_size(decoder: &mut JpegDecoder<ZCursor<&[u8]>>) -> Result<(usize, usize), String> {
    decoder.decode_headers().map_err(|error| error.to_string())?;
    let info = decoder.info().ok_or("it has no size")?;
    Ok((info.width.into(), info.height.into()))
}

fn decode_jpeg(bytes: &[u8]) -> Result<Picture, String> {
    let mut decoder = jpeg_decoder(bytes);
    let (width, height) = jpeg_size(&mut decoder)?;
    let rgb = decoder.decode().map_err(|error| error.to_string())?;
    whole(width, height, rgb)
}

fn whole(width: usize, height: usize, rgb: Vec<u8>) -> Result<Picture, String> {
    if rgb.len() != width * height * 3 || rgb.is_empty() {
        return Err(format!("it is {width} × {height} and decodes to {} bytes", rgb.len()));
    }
    Ok((width, height, rgb))
}
