//! The layouts against bytes written by hand, and against the kernel's own header.

use std::mem::{align_of, offset_of, size_of};
use std::process::Command;

use super::*;

fn region(addr: u64, size: u32) -> Region {
    Region { addr, size }
}

#[test]
fn a_compress_descriptor_has_the_bytes_of_the_abi() {
    let aecs = region(0x5152_5354_5556_5740, 1568);
    let source = region(0x2122_2324_2526_2728, 0x0001_0203);
    let target = region(0x3132_3334_3536_3738, 0x0011_1213);
    let made = Descriptor::compress(source, target, aecs, 0x1112_1314_1516_1700);
    #[rustfmt::skip]
    let golden: [u8; 64] = [
        0, 0, 0, 0, 0x0C, 0x01, 0x01, 0x43,
        0x00, 0x17, 0x16, 0x15, 0x14, 0x13, 0x12, 0x11,
        0x28, 0x27, 0x26, 0x25, 0x24, 0x23, 0x22, 0x21,
        0x38, 0x37, 0x36, 0x35, 0x34, 0x33, 0x32, 0x31,
        0x03, 0x02, 0x01, 0x00, 0, 0, 0x06, 0x00,
        0x40, 0x57, 0x56, 0x55, 0x54, 0x53, 0x52, 0x51,
        0x13, 0x12, 0x11, 0x00, 0x20, 0x06, 0, 0,
        0, 0, 0, 0, 0, 0, 0, 0,
    ];
    assert_eq!(made.to_bytes(), golden);
}

#[test]
fn a_decompress_descriptor_has_the_bytes_of_the_abi() {
    let made = Descriptor::decompress(region(0x1000, 5), region(0x2000, 6), 0x40);
    #[rustfmt::skip]
    let golden: [u8; 64] = [
        0, 0, 0, 0, 0x0E, 0x01, 0x00, 0x42,
        0x40, 0, 0, 0, 0, 0, 0, 0,
        0x00, 0x10, 0, 0, 0, 0, 0, 0,
        0x00, 0x20, 0, 0, 0, 0, 0, 0,
        5, 0, 0, 0, 0, 0, 0x0F, 0x00,
        0, 0, 0, 0, 0, 0, 0, 0,
        6, 0, 0, 0, 0, 0, 0, 0,
        0, 0, 0, 0, 0, 0, 0, 0,
    ];
    assert_eq!(made.blocking_on_fault().to_bytes(), golden);
}

#[test]
fn a_record_is_read_at_the_offsets_of_the_abi() {
    let bytes: [u8; 64] = std::array::from_fn(|at| u8::try_from(at).unwrap() + 0x84);
    assert_eq!(
        Completion::parse(&bytes),
        Completion {
            status: Status::PageFault,
            fault_was_write: true,
            error_code: 0x85,
            bytes_completed: 0x8B8A_8988,
            fault_addr: 0x9392_9190_8F8E_8D8C,
            output_size: 0x9F9E_9D9C,
            output_bits: 0xA0,
            crc: 0xA7A6_A5A4,
        }
    );
}

#[test]
fn an_unknown_status_is_kept() {
    assert_eq!(Status::from_byte(0x7E), Status::Unknown(0x7E));
    assert_eq!(Status::Unknown(0x7E).to_string(), "unknown status 0x7e");
}

/// What this module says, one `name value` a line, in the words of the C program below.
fn ours() -> String {
    let mut text = format!(
        "desc {}\nrecord {}\nCOMPRESS {}\nDECOMPRESS {}\nBOF {}\nCRAV {}\nRCR {}\nCC {}\nAECS {}\n",
        size_of::<Descriptor>(),
        size_of::<RawRecord>(),
        Opcode::Compress as u8,
        Opcode::Decompress as u8,
        FLAG_BLOCK_ON_FAULT,
        FLAG_RECORD_VALID,
        FLAG_REQUEST_RECORD,
        FLAG_CACHE_CONTROL,
        FLAG_READ_AECS,
    );
    for (name, offset) in [
        ("completion_addr", offset_of!(Descriptor, completion_addr)),
        ("src1_addr", offset_of!(Descriptor, src1_addr)),
        ("dst_addr", offset_of!(Descriptor, dst_addr)),
        ("src1_size", offset_of!(Descriptor, src1_size)),
        ("int_handle", offset_of!(Descriptor, int_handle)),
        ("compr_flags", offset_of!(Descriptor, compr_flags)),
        ("src2_addr", offset_of!(Descriptor, src2_addr)),
        ("max_dst_size", offset_of!(Descriptor, max_dst_size)),
        ("src2_size", offset_of!(Descriptor, src2_size)),
        ("filter_flags", offset_of!(Descriptor, filter_flags)),
        ("num_inputs", offset_of!(Descriptor, num_inputs)),
        // Offsets of `Completion::parse`, which another test pins.
        ("error_code", 1),
        ("bytes_completed", 4),
        ("fault_addr", 8),
        ("output_size", 24),
        ("output_bits", 28),
        ("crc", 32),
    ] {
        text += &format!("{name} {offset}\n");
    }
    for (_, number, name) in Status::NAMED {
        text += &format!("{name} {number}\n");
    }
    text
}

/// A C program that prints the same from the header.
fn c_program() -> String {
    let mut code = String::from(
        "#include <stddef.h>\n#include <stdio.h>\n#include <linux/idxd.h>\n\
         #define D(f) printf(#f \" %zu\\n\", offsetof(struct iax_hw_desc, f));\n\
         #define R(f) printf(#f \" %zu\\n\", offsetof(struct iax_completion_record, f));\n\
         #define N(s, v) printf(s \" %u\\n\", (unsigned)(v));\n\
         int main(void) {\n\
         N(\"desc\", sizeof(struct iax_hw_desc)) N(\"record\", sizeof(struct iax_completion_record))\n\
         N(\"COMPRESS\", IAX_OPCODE_COMPRESS) N(\"DECOMPRESS\", IAX_OPCODE_DECOMPRESS)\n\
         N(\"BOF\", IDXD_OP_FLAG_BOF) N(\"CRAV\", IDXD_OP_FLAG_CRAV) N(\"RCR\", IDXD_OP_FLAG_RCR)\n\
         N(\"CC\", IDXD_OP_FLAG_CC) N(\"AECS\", IDXD_OP_FLAG_RD_SRC2_AECS)\n\
         D(completion_addr) D(src1_addr) D(dst_addr) D(src1_size) D(int_handle) D(compr_flags)\n\
         D(src2_addr) D(max_dst_size) D(src2_size) D(filter_flags) D(num_inputs)\n\
         R(error_code) R(bytes_completed) R(fault_addr) R(output_size) R(output_bits) R(crc)\n",
    );
    for (_, _, name) in Status::NAMED {
        code += &format!("N(\"{name}\", {name})\n");
    }
    code + "return 0; }\n"
}

#[test]
fn the_layouts_are_those_of_the_kernels_header() {
    assert_eq!((align_of::<Descriptor>(), align_of::<RawRecord>()), (64, 64));
    if !std::path::Path::new("/usr/include/linux/idxd.h").exists() {
        eprintln!("skipped: no linux/idxd.h here (package linux-libc-dev)");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (source, program) = (dir.path().join("abi.c"), dir.path().join("abi"));
    std::fs::write(&source, c_program()).unwrap();
    let Ok(made) = Command::new("cc").arg("-o").arg(&program).arg(&source).output() else {
        eprintln!("skipped: no C compiler here");
        return;
    };
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let printed = Command::new(&program).output().unwrap();
    assert_eq!(ours(), String::from_utf8(printed.stdout).unwrap());
}
