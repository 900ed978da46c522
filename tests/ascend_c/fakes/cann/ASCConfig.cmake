# What find_package(ASC) finds on a machine without CANN: the language ASC, with bin/bisheng as its compiler.
list(APPEND CMAKE_MODULE_PATH ${CMAKE_CURRENT_LIST_DIR})
