// What a library tells of itself; one source of each library includes this.
#pragma once

#ifndef PASA_BUILD_RECORD
#define PASA_BUILD_RECORD ""
#endif

// The versions that this library was built with, for who reads the file before loading it
// (ops/attention/ascend/build_record.py).
extern "C" __attribute__((used, visibility("default"))) const char pasa_build_record[] = "pasa-build:" PASA_BUILD_RECORD;
